"""What the routes of one gateway share: its engine, its model, its limits, its metrics, and whether it still takes requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from conductor.engine_client import ClusterStatus, EngineClient
from conductor.gateway.errors import ApiError, retry_after, unavailable
from conductor.gateway.plan import Planner
from conductor.gateway.served_model import ServedModel
from conductor.gateway.settings import GatewaySettings
from conductor.metrics import GatewayMetrics

logger = logging.getLogger(__name__)


class Service:
    """Mutable in two things: the count of generations in flight, and `draining`."""

    def __init__(self, engine: EngineClient, served: ServedModel, settings: GatewaySettings) -> None:
        self.engine = engine
        self.served = served
        self.settings = settings
        self.metrics = GatewayMetrics()
        self.planner = Planner(served, settings)
        self.draining = False
        self.in_flight = 0

    def drain(self) -> None:
        """Take no new generations; those in flight go on."""
        self.draining = True

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Room for one generation; raises `ApiError` before any work is done for a request that finds none."""
        if self.draining:
            raise unavailable("this gateway is shutting down", "draining", self.settings.unavailable_retry_after_s)
        if self.in_flight >= self.settings.max_in_flight:
            raise self._queue_full()
        self._count(+1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.in_flight += change
        self.metrics.in_flight = self.in_flight

    def _queue_full(self) -> ApiError:
        limit = self.settings.max_in_flight
        self.metrics.rejected("gateway_full")
        return ApiError(
            429,
            f"{self.in_flight} generations are in flight at this gateway; allowed: {limit}",
            "gateway_full",
            headers=retry_after(self.settings.overload_retry_after_s),
            details={"retry_after_s": self.settings.overload_retry_after_s},
        )

    async def decision(self, request_id: str) -> Mapping[str, Any] | None:
        """None for an id that is unknown; raises `ApiError` 503 when the cluster does not answer."""
        try:
            return await self.engine.decision(request_id)
        except Exception as problem:
            logger.exception("the cluster did not tell about decision %s", request_id)
            message = "the cluster behind the gateway does not answer"
            raise unavailable(message, "engine_unavailable", self.settings.unavailable_retry_after_s) from problem

    async def status(self) -> ClusterStatus | None:
        """None when the cluster does not answer."""
        try:
            return await self.engine.status()
        except Exception:
            logger.exception("the cluster did not tell its status")
            return None
