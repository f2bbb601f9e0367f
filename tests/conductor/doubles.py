"""Doubles for the live driver: a scheduler that follows a script, workers that note their calls, and small builders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from conductor.core.commands import Command
from conductor.core.cost_profile import CostProfile
from conductor.core.events import Event, Tick
from conductor.core.messages import GenerationJob, SamplingParams
from conductor.core.types import (
    Placement,
    Rejection,
    RejectReason,
    Request,
    ReusePlan,
    Role,
    Tier,
    TTFTEstimate,
    WorkerSpec,
)


class LostWorkerError(Exception):
    """What a call to a dead worker raises here."""


class ScriptedScheduler:
    """Notes every event and answers what `answer` says."""

    def __init__(self, answer: Callable[[Event], list[Command]] = lambda event: []) -> None:
        self.answer = answer
        self.events: list[Event] = []
        self.times: list[float] = []
        self.deadline: float | None = None
        self.unknown: set[str] = set()

    def handle(self, event: Event, now: float) -> list[Command]:
        self.events.append(event)
        self.times.append(now)
        if isinstance(event, Tick):
            self.deadline = None
        return self.answer(event)

    def next_deadline(self) -> float | None:
        return self.deadline

    def decision_record(self, request_id: str) -> Mapping[str, Any] | None:
        return {"request_id": request_id} if any(getattr(e, "request_id", None) == request_id for e in self.events) else None

    def unknown_caches(self) -> set[str]:
        return self.unknown

    def worker_belief(self) -> Mapping[str, Mapping[str, Any]]:
        return {}

    def overview(self, now: float) -> Mapping[str, Any]:
        return {"at_s": now}

    def seen(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class _Method:
    def __init__(self, worker: FakeWorker, name: str) -> None:
        self._worker, self._name = worker, name

    async def remote(self, *args: Any) -> Any:
        if self._name == "alive":
            await self._worker.died.wait()
            raise LostWorkerError("process ended")
        self._worker.calls.append((self._name, *args))
        if self._name in self._worker.errors:
            raise self._worker.errors[self._name]
        return None


class FakeWorker:
    """Stands for an actor handle: notes calls, fails those in `errors`, and dies when told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.errors: dict[str, Exception] = {}
        self.died = asyncio.Event()

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


def spec(worker_id: str, role: Role = Role.PREFILL, node: str = "node-1") -> WorkerSpec:
    profile = CostProfile(0.01, 1e-3, 0.0, 0.05, 0.01, 0.0, kv_bytes_per_token=1024, block_tokens=4)
    return WorkerSpec(worker_id, role, node, profile, {Tier.DEVICE: 64}, model="tiny")


def request(request_id: str = "r1", *, attempt: int = 1, tokens: int = 8) -> Request:
    return Request(request_id, tokens, (1, 2), max_output_tokens=16, attempt=attempt)


def job(request_id: str = "r1", *, attempt: int = 1, tokens: int = 8, max_tokens: int = 16) -> GenerationJob:
    prompt = b"".join(i.to_bytes(4, "little") for i in range(tokens))
    return GenerationJob(request(request_id, attempt=attempt, tokens=tokens), prompt, SamplingParams(max_tokens), "gateway-1")


def placement(
    request_id: str = "r1", *, attempt: int = 1, decode: str | None = "d0", reuse: ReusePlan | None = None
) -> Placement:
    ttft = TTFTEstimate(0.0, 0.0, 0.1, 0.05, 0.2, calibrated=True)
    return Placement(request_id, attempt, "p0", decode, reuse or ReusePlan(), ttft, tbt_s=0.05)


def rejection(request_id: str = "r1", reason: RejectReason = RejectReason.NO_PREFILL) -> Rejection:
    return Rejection(request_id, reason, "no worker", retry_after_s=1.0)
