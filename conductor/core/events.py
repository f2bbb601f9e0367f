"""What the world tells the scheduler. Past tense; immutable; everything that a decision may depend on arrives here.

Worker events carry a `Stamp`. Within one epoch the sequence has no gaps: a gap makes the scheduler ask for a snapshot, a new
epoch forgets everything that the old one claimed, and a repeated or older stamp is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from conductor.core.types import (
    BlockHash,
    FinishReason,
    Request,
    RequestId,
    Stamp,
    Tier,
    TierReport,
    WorkerId,
    WorkerLoad,
    WorkerSpec,
)


@dataclass(frozen=True, slots=True)
class RequestArrived:
    request: Request


@dataclass(frozen=True, slots=True)
class RequestResumed:
    """The continuation of an interrupted request, as asked for by a `ResumeRequest` command."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    worker: WorkerSpec
    epoch: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker's process or node is gone. An `epoch` older than the one that last joined is ignored."""

    worker_id: WorkerId
    epoch: int


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """The worker takes no new work and will leave when its requests are done."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """`blocks` follow each other; `parent` is the hash before the first, None at the root of a prefix."""

    stamp: Stamp
    tier: Tier
    parent: BlockHash | None
    blocks: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    stamp: Stamp
    tier: Tier
    blocks: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    stamp: Stamp
    tier: Tier


@dataclass(frozen=True, slots=True)
class IndexSnapshot:
    """Everything the source holds as of `stamp`; later events continue from `stamp.seq`."""

    stamp: Stamp
    blocks: Mapping[Tier, tuple[BlockHash, ...]]


@dataclass(frozen=True, slots=True)
class LoadReported:
    worker_id: WorkerId
    epoch: int
    load: WorkerLoad
    tiers: tuple[TierReport, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """`fetch_s` is how long it took to bring the prefix from elsewhere, None where nothing was to be brought."""

    request_id: RequestId
    attempt: int
    worker_id: WorkerId
    fetch_s: float | None = None


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """The prompt is computed. `reused_tokens` were really reused; `compute_s` is the time of the rest alone."""

    request_id: RequestId
    attempt: int
    worker_id: WorkerId
    reused_tokens: int
    compute_s: float
    warmup: bool = False  # first calls on a fresh worker: not evidence for the cost model


@dataclass(frozen=True, slots=True)
class HandoverFinished:
    """The decode worker holds the whole prompt's KV."""

    request_id: RequestId
    attempt: int
    transfer_bytes: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class RequestFinished:
    request_id: RequestId
    attempt: int
    output_tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A worker could not go on with the request although it lives itself; the scheduler places it again."""

    request_id: RequestId
    attempt: int
    worker_id: WorkerId
    message: str


@dataclass(frozen=True, slots=True)
class TransferFinished:
    transfer_id: str
    transfer_bytes: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class TransferFailed:
    transfer_id: str
    message: str


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """How KV really comes to `worker_id` from `source`: a transfer by itself, and all that overlap together. `protocol` is what
    carries it."""

    worker_id: WorkerId
    epoch: int
    source: WorkerId
    transport: str
    protocol: str
    bytes_per_s: float
    shared_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: the answer to `Scheduler.next_deadline()`."""


Event: TypeAlias = (
    RequestArrived
    | RequestResumed
    | RequestCancelled
    | WorkerJoined
    | WorkerLost
    | WorkerDraining
    | BlocksStored
    | BlocksRemoved
    | CacheCleared
    | IndexSnapshot
    | LoadReported
    | PrefillStarted
    | PrefillFinished
    | HandoverFinished
    | FirstToken
    | RequestFinished
    | RequestFailed
    | TransferFinished
    | TransferFailed
    | LinkMeasured
    | Tick
)
