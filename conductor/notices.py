"""What the Conductor tells a front end on its notice channel, beside the tokens that workers send it directly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from conductor.core.types import Rejection, RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class ResumeNotice:
    """A worker of the request is gone: submit the continuation of what `attempt` had produced."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class RejectionNotice:
    """A request that had been placed is refused after all."""

    rejection: Rejection


@dataclass(frozen=True, slots=True)
class WorkerNotice:
    """A worker's life `epoch` began (`handle` is its actor handle) or ended (`handle` is None)."""

    worker_id: WorkerId
    epoch: int
    handle: Any | None


Notice: TypeAlias = ResumeNotice | RejectionNotice | WorkerNotice
