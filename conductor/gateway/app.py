"""Puts the gateway together: routes, error shapes, and the OpenAPI document."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from conductor.engine_client import EngineClient
from conductor.gateway.edge import Edge
from conductor.gateway.errors import ApiError
from conductor.gateway.generate import KINDS, GenerateEndpoint
from conductor.gateway.openapi import add_generation
from conductor.gateway.operations import api_router, operations_router
from conductor.gateway.responses import JSON
from conductor.gateway.served_model import ServedModel
from conductor.gateway.service import Service
from conductor.gateway.settings import GatewaySettings
from conductor.gateway.tokens import tokens_router

ROUTE_CODES = {404: "unknown_route", 405: "method_not_allowed"}


class GatewayApp(FastAPI):
    """FastAPI for everything but tokens: the generating endpoints are reached straight from the edge, since routing and
    middleware would cost more than the rest of a short request."""

    def __init__(self, service: Service) -> None:
        super().__init__(title="Conductor", docs_url=None, redoc_url=None)
        endpoints = {path: GenerateEndpoint(service, kind) for path, kind in KINDS.items()}
        for path, endpoint in endpoints.items():
            self.router.routes.append(Route(path, endpoint, methods=["POST"]))
        self.state.service = service
        self._edge = Edge(super().__call__, endpoints, service.access, service.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._edge(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = add_generation(super().openapi())
        return self.openapi_schema


def create_app(engine: EngineClient, served: ServedModel, settings: GatewaySettings | None = None) -> GatewayApp:
    """The ASGI application. `app.state.service` is its `Service`, for the server that drains it."""
    service = Service(engine, served, settings or GatewaySettings())
    app = GatewayApp(service)
    app.include_router(api_router(service))
    app.include_router(operations_router(service))
    app.include_router(tokens_router(service))
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_route_error)
    return app


async def on_api_error(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, ApiError)
    return Response(problem.body(), problem.status, problem.headers, media_type=JSON)


async def on_route_error(request: Request, problem: Exception) -> Response:
    """Unknown paths and methods, as the router finds them."""
    assert isinstance(problem, HTTPException)
    phrase = HTTPStatus(problem.status_code).phrase.lower()
    allowed = (problem.headers or {}).get("Allow")
    message = f"{request.method} {request.url.path}: {phrase}" + (f"; allowed: {allowed}" if allowed else "")
    code = ROUTE_CODES.get(problem.status_code, "invalid_request")
    return await on_api_error(request, ApiError(problem.status_code, message, code, headers=problem.headers))
