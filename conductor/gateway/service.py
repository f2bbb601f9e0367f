"""What the routes of one gateway share: its engine, its model, its limits, its metrics, and whether it still takes requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from conductor.engine_client import ClusterStatus, EngineClient
from conductor.gateway.access import Access
from conductor.gateway.account import Account
from conductor.gateway.errors import ApiError, retry_after, unavailable
from conductor.gateway.plan import Plan, Planner
from conductor.gateway.served_model import ServedModel
from conductor.gateway.settings import GatewaySettings
from conductor.gateway.tracing import Tracing
from conductor.gateway.waiting_room import WaitingRoom
from conductor.metrics import GatewayMetrics

logger = logging.getLogger(__name__)
RECORDS_TIMEOUT_S = 1.0


class Service:
    """Mutable in two things: the count of generations in flight (those that wait for their turn too), and `draining`."""

    def __init__(
        self,
        engine: EngineClient,
        served: ServedModel,
        settings: GatewaySettings,
        tracing: Tracing | None = None,
    ) -> None:
        """Raises `KeysError` when the keys file cannot be used."""
        self.engine = engine
        self.served = served
        self.settings = settings
        self.metrics = GatewayMetrics()
        self.planner = Planner(served, settings)
        self.access = Access(settings.keys_file)
        self.room = WaitingRoom(settings.max_in_flight, settings.max_wait_s)
        self.metrics.waiting_for_turn = self.room.__len__
        self.tracing = tracing or Tracing(None)
        self.draining = False
        self.ended = asyncio.Event()  # set when the server closes: streams that would go on for ever end
        self.in_flight = 0

    def drain(self) -> None:
        """Take no new generations; those in flight go on."""
        self.draining = True

    @contextmanager
    def slot(self, account: Account) -> Iterator[None]:
        """Room for one generation; raises `ApiError` before any work is done for a request that finds none."""
        if self.draining:
            raise unavailable("this gateway is shutting down", "draining", self.settings.unavailable_retry_after_s)
        try:
            account.check()
            self._check_room(account)
        except ApiError as problem:
            self.metrics.rejected(problem.code)
            raise
        self._count(account, +1)
        try:
            yield
        finally:
            self._count(account, -1)

    def _count(self, account: Account, change: int) -> None:
        account.in_flight += change
        self.in_flight += change
        self.metrics.in_flight = self.in_flight

    def _check_room(self, account: Account) -> None:
        """The waiting room is bounded for each tenant, so that nobody can fill it for the others."""
        limits = self.settings
        if self.in_flight < limits.max_in_flight or account.waiting < limits.max_waiting:
            return
        raise ApiError(
            429,
            f"{self.in_flight} generations are in flight here and {account.waiting} of this tenant wait for their turn; "
            f"allowed: {limits.max_in_flight} and {limits.max_waiting}",
            "gateway_full",
            headers=retry_after(self.settings.overload_retry_after_s),
            details={"reason": "gateway_full", "retry_after_s": self.settings.overload_retry_after_s},
        )

    async def decision(self, request_id: str) -> Mapping[str, Any] | None:
        """None for an id that is unknown; raises `ApiError` 503 when the cluster does not answer."""
        try:
            return await self.engine.decision(request_id)
        except Exception as problem:
            logger.exception("the cluster did not tell about decision %s", request_id)
            message = "the cluster behind the gateway does not answer"
            raise unavailable(message, "engine_unavailable", self.settings.unavailable_retry_after_s) from problem

    async def records(self, plan: Plan) -> dict[str, Mapping[str, Any]]:
        """What the cluster knows of the jobs of a request that has been answered; nothing when it does not tell soon."""
        ids = [job.request.id for job in plan.jobs]
        try:
            async with asyncio.timeout(RECORDS_TIMEOUT_S):
                found = await asyncio.gather(*(self.engine.decision(job_id) for job_id in ids))
        except Exception as problem:
            logger.warning("the cluster did not tell about request %s: %s", plan.id, type(problem).__name__)
            return {}
        return {job_id: record for job_id, record in zip(ids, found, strict=True) if record is not None}

    async def overview(self) -> Mapping[str, Any] | None:
        """None when the cluster does not answer."""
        try:
            return await self.engine.overview()
        except Exception as problem:
            logger.warning("the cluster did not tell what it sees: %s", type(problem).__name__)
            return None

    async def cache(self, action: str, name: int | None) -> Mapping[str, Any]:
        """Raises `ApiError` 503 when the cluster does not answer."""
        try:
            return await self.engine.cache_command(action, name)
        except Exception as problem:
            logger.exception("the cluster did not do %s", action)
            message = "the cluster behind the gateway does not answer"
            raise unavailable(message, "engine_unavailable", self.settings.unavailable_retry_after_s) from problem

    async def status(self) -> ClusterStatus | None:
        """None when the cluster does not answer."""
        try:
            return await self.engine.status()
        except Exception:
            logger.exception("the cluster did not tell its status")
            return None
