"""The scheduler as its live driver sees it, so that the driver can be tested around a scripted one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from conductor.core.commands import Command
from conductor.core.events import Event
from conductor.core.types import RequestId, WorkerId


class SchedulerPort(Protocol):
    """The scheduler, as its live driver sees it."""

    def handle(self, event: Event, now: float) -> list[Command]: ...

    def next_deadline(self) -> float | None: ...

    def decision_record(self, request_id: RequestId) -> Mapping[str, Any] | None: ...

    def unknown_caches(self) -> Collection[WorkerId]: ...

    def worker_belief(self) -> Mapping[WorkerId, Mapping[str, Any]]: ...

    def overview(self, now: float) -> Mapping[str, Any]: ...
