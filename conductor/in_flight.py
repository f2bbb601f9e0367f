"""Requests that have not ended: their payloads, who waits for their decision, and where they were placed last."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from conductor.core.messages import GenerationJob
from conductor.core.types import Decision, Placement, RequestId, WorkerId


@dataclass(slots=True)
class _Entry:
    job: GenerationJob
    decision: asyncio.Future[Decision] | None
    placement: Placement | None = None


class InFlight:
    """For one event loop. A request is known from `begin` until `forget`."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def begin(self, job: GenerationJob) -> asyncio.Future[Decision]:
        """Keep the payload of a request or of its continuation; the future resolves with `decide` or `fail`."""
        self.fail(
            job.request.id, RuntimeError(f"request {job.request.id!r} was submitted again as attempt {job.request.attempt}")
        )
        decision: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._entries[job.request.id] = _Entry(job, decision)
        return decision

    def job(self, request_id: RequestId) -> GenerationJob | None:
        entry = self._entries.get(request_id)
        return None if entry is None else entry.job

    def placement(self, request_id: RequestId) -> Placement | None:
        entry = self._entries.get(request_id)
        return None if entry is None else entry.placement

    def uses(self, worker_id: WorkerId) -> bool:
        """Whether a placed request needs the worker."""
        placements = [entry.placement for entry in self._entries.values() if entry.placement is not None]
        return any(worker_id in (placement.prefill, placement.decode) for placement in placements)

    def place(self, placement: Placement) -> GenerationJob | None:
        """Note the placement and hand it to whoever waits; the payload to send, or None for an unknown request."""
        entry = self._entries.get(placement.request_id)
        if entry is None:
            return None
        entry.placement = placement
        self.decide(placement.request_id, placement)
        return entry.job

    def decide(self, request_id: RequestId, decision: Decision) -> bool:
        """Hand the decision to whoever waits for it; False when nobody does."""
        waiting = self._take_waiting(request_id)
        if waiting is None:
            return False
        if not waiting.done():
            waiting.set_result(decision)
        return True

    def fail(self, request_id: RequestId, error: Exception) -> None:
        """Let whoever waits for the decision have the error instead."""
        waiting = self._take_waiting(request_id)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    def fail_all(self, error: Exception) -> None:
        for request_id in self._entries:
            self.fail(request_id, error)

    def forget(self, request_id: RequestId, attempt: int | None = None) -> None:
        """The request has ended. With `attempt`, only if that is its latest."""
        entry = self._entries.get(request_id)
        if entry is not None and attempt in (None, entry.job.request.attempt):
            del self._entries[request_id]

    def _take_waiting(self, request_id: RequestId) -> asyncio.Future[Decision] | None:
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        waiting, entry.decision = entry.decision, None
        return waiting
