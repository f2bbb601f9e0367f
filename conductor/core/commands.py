"""What the scheduler asks of the world. Imperative; immutable; the drivers carry them out and answer with events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from conductor.core.types import (
    BlockHash,
    Holder,
    Placement,
    Rejection,
    RequestId,
    TransferReason,
    WorkerId,
)


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Send the request to `placement.prefill`, which hands its KV over to `placement.decode` (if that is chosen yet)."""

    placement: Placement


@dataclass(frozen=True, slots=True)
class StartDecode:
    """Choose the decode worker of a request whose placement left it open (admission `on_prefill_done`)."""

    request_id: RequestId
    attempt: int
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Reject:
    rejection: Rejection


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop the request on `workers` and release everything that it holds there."""

    request_id: RequestId
    attempt: int
    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """A worker of the request is gone: ask the front end for the continuation (a `RequestResumed` event)."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class TransferBlocks:
    """Copy blocks to `target`'s device pool (or its node's tier). Answered by TransferFinished or TransferFailed."""

    transfer_id: str
    source: Holder
    target: Holder
    blocks: tuple[BlockHash, ...]
    reason: TransferReason


@dataclass(frozen=True, slots=True)
class DropBlocks:
    """Advice: these are the first to go."""

    holder: Holder
    blocks: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """Ask `source` for everything that it holds."""

    source: str
    epoch: int


Command: TypeAlias = (
    StartPrefill | StartDecode | Reject | Cancel | ResumeRequest | TransferBlocks | DropBlocks | RequestSnapshot
)
