"""Routes for people and machines that run the service: liveness, readiness, metrics, models, and why a decision was made."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from conductor.gateway.edge import ACCOUNT
from conductor.gateway.errors import ApiError, invalid, shown, unavailable
from conductor.gateway.served_model import ServedModel
from conductor.gateway.service import Service

EMBEDDINGS_MESSAGE = "this server generates text; it has no embeddings"


def operations_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """The process lives."""
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> dict[str, str]:
        """The cluster takes requests; 503 with the reason while it does not."""
        reason = await not_ready_because(service)
        if reason is not None:
            raise unavailable(reason, "not_ready", service.settings.unavailable_retry_after_s)
        return {"status": "ready", "model": service.served.name}

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(service.metrics.exposition(await service.status()), media_type=CONTENT_TYPE_LATEST)

    return router


def api_router(service: Service) -> APIRouter:
    """The parts of the OpenAI API that generate nothing, and decisions."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card(service.served, name) for name in service.served.names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in service.served.names:
            problem = invalid("model", name, ", ".join(service.served.names), "model_not_found")
            raise ApiError(404, problem.message, problem.code, param="model")
        return model_card(service.served, name)

    @router.get("/v1/decisions/{decision_id}")
    async def decision(decision_id: str, request: Request) -> JSONResponse:
        """Every candidate with its terms, the choice, and what happened."""
        record = await service.decision(decision_id)
        tenant = request.scope[ACCOUNT].tenant.name
        if record is None or record.get("tenant") != tenant:
            message = f"no decision has the id {shown(decision_id)}; allowed: the id of a recent request"
            raise ApiError(404, message, "decision_not_found", param="decision_id")
        return JSONResponse(record)

    @router.post("/v1/embeddings")
    async def embeddings() -> None:
        raise ApiError(404, EMBEDDINGS_MESSAGE, "unsupported_endpoint")

    return router


async def not_ready_because(service: Service) -> str | None:
    if service.draining:
        return "this gateway is shutting down"
    status = await service.status()
    if status is None:
        return "the cluster behind the gateway does not answer"
    return None if status.ready else status.reason or "the cluster is not ready"


def model_card(served: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created_s,
        "owned_by": served.owned_by,
        "max_model_len": served.max_context,
    }
