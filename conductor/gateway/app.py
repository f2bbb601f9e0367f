"""Puts the gateway together: routes, error shapes, and the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from conductor.engine_client import EngineClient
from conductor.gateway.answers import error_response, on_route_error
from conductor.gateway.dashboard import dashboard_routes
from conductor.gateway.edge import Edge
from conductor.gateway.errors import ApiError
from conductor.gateway.generate import KINDS, GenerateEndpoint
from conductor.gateway.openapi import complete
from conductor.gateway.operations import api_router, operations_router
from conductor.gateway.served_model import ServedModel
from conductor.gateway.service import Service
from conductor.gateway.settings import GatewaySettings
from conductor.gateway.tokens import tokens_router
from conductor.gateway.tracing import Tracing


class GatewayApp(FastAPI):
    """FastAPI for everything but tokens: the generating endpoints are reached straight from the edge, since routing and
    middleware would cost more than the rest of a short request."""

    def __init__(self, service: Service) -> None:
        super().__init__(title="Conductor", docs_url=None, redoc_url=None)
        endpoints = {path: GenerateEndpoint(service, kind) for path, kind in KINDS.items()}
        for path, endpoint in endpoints.items():
            self.router.routes.append(Route(path, endpoint, methods=["POST"]))
        self.state.service = service
        self._edge = Edge(super().__call__, endpoints, service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._edge(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = complete(super().openapi())
        return self.openapi_schema


def create_app(
    engine: EngineClient, served: ServedModel, settings: GatewaySettings | None = None, tracing: Tracing | None = None
) -> GatewayApp:
    """The ASGI application. `app.state.service` is its `Service`, for the server that drains it."""
    service = Service(engine, served, settings or GatewaySettings(), tracing)
    app = GatewayApp(service)
    app.include_router(api_router(service))
    app.include_router(operations_router(service))
    app.include_router(tokens_router(service))
    if service.settings.keys_file is None:  # where keys are asked for, it is the operator's, on the admin port
        app.router.routes.extend(dashboard_routes(service))
    app.add_exception_handler(ApiError, error_response)
    app.add_exception_handler(HTTPException, on_route_error)
    return app
