"""The scheduler as its live driver sees it.

Whatever answers to this can be driven: the real one, or one that a test scripts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from conductor.core.commands import Command
from conductor.core.events import Event
from conductor.core.types import RequestId, WorkerId


class SchedulerPort(Protocol):
    def handle(self, event: Event, now: float) -> list[Command]: ...

    def next_deadline(self) -> float | None: ...

    def decision_record(self, request_id: RequestId) -> Mapping[str, Any] | None: ...

    def worker_belief(self) -> Mapping[WorkerId, Mapping[str, Any]]: ...

    def overview(self, now: float) -> Mapping[str, Any]: ...
