"""The nouns of the scheduler: immutable values that events, commands and decisions are made of.

Nothing here decides anything. Units are in the names: `_s` seconds, `_bytes`, `_tokens`, `_blocks`. A missing value is
`None`, never a sentinel number. Terms follow the field (Mooncake, FAST'25; vLLM; Dynamo): see the glossary in
`conductor/DESIGN.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TypeAlias

from conductor.core.cost_profile import CostProfile

WorkerId: TypeAlias = str
RequestId: TypeAlias = str
SHARED_STORE = "shared"
"""The owner of the tier that every node sees."""

BlockHash: TypeAlias = int
"""A 128-bit hash chained over a whole prefix inside one KV namespace: equal hashes mean equal prefixes.

Trace replay uses the trace's own prefix ids as hashes."""


class InvariantError(AssertionError):
    """The scheduler's own state is inconsistent: a bug, never a consequence of bad input."""


class Role(StrEnum):
    """What a worker does with requests."""

    PREFILL = "prefill"
    DECODE = "decode"
    COUPLED = "coupled"  # both on one engine, as an undisaggregated server runs


class Tier(IntEnum):
    """Where a block lies, fastest first. The wire word for it is `medium`."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    SHARED = 3


class Priority(IntEnum):
    """Admission class of a request; lower values are served first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(frozen=True, slots=True)
class SLO:
    """Objectives of one request; None means that it has none."""

    ttft_s: float | None = None
    tbt_s: float | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the scheduler sees it: lengths and hashes, never token text.

    `block_hashes` holds one hash for each *full* block of the prompt. After a lost worker the same request comes back with
    `attempt` raised, `emitted_tokens` of its output already delivered, and a prompt that contains them.
    """

    id: RequestId
    prompt_tokens: int
    block_hashes: tuple[BlockHash, ...]
    max_output_tokens: int
    slo: SLO = SLO()
    priority: Priority = Priority.NORMAL
    traffic_class: str = "chat"
    session: str | None = None
    tenant: str = "default"
    model: str = ""
    attempt: int = 1
    emitted_tokens: int = 0
    sharing_group: str | None = None  # tenants of one group reuse each other's prefixes

    @property
    def cache_domain(self) -> str:
        """The salt of the KV namespace: requests of one domain share prefixes. No tenant's name has a '+'."""
        return cache_domain(self.tenant, self.sharing_group)


def cache_domain(tenant: str, sharing_group: str | None) -> str:
    return tenant if sharing_group is None else f"+{sharing_group}"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker says of itself when it joins.

    `node` names the host whose DRAM and disk tiers the worker shares; `rack` and `zone` widen the failure domain.
    `capacity_blocks` bounds each tier that the worker (DEVICE) or its node (HOST, DISK) has.
    """

    id: WorkerId
    role: Role
    node: str
    profile: CostProfile
    capacity_blocks: dict[Tier, int] = field(default_factory=dict)
    model: str = ""
    rack: str = ""
    zone: str = ""
    nic_bytes_per_s: float | None = None
    max_batch: int = 256


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker reports of its own load at one moment."""

    queued_requests: int = 0
    queued_prefill_tokens: int = 0
    running_prefill_remaining_s: float = 0.0
    decode_batch: int = 0
    decode_context_tokens: int = 0
    free_blocks: int = 0
    transport_fallbacks: int = 0  # times that another transport took the place of one that failed


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """How one tier off the device is doing, as a worker sees it: news for people, but for the speed at which it is read.

    Counts are blocks. `read_bytes_per_s` is what the worker's restores have lately come to. `dropped` found the way to the tier
    full or blocked, `waiting` are yet to be written. `failure` says why the tier takes nothing more, or is not there at all.
    """

    tier: Tier
    blocks: int = 0
    capacity_blocks: int = 0
    used_bytes: int = 0
    stored: int = 0
    evicted: int = 0
    hits: int = 0
    misses: int = 0
    quarantined: int = 0
    pinned: int = 0
    dropped: int = 0
    waiting: int = 0
    read_bytes_per_s: float | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Stamp:
    """Origin of a worker event: its source, the source's life (`epoch`) and a sequence number without gaps from 1."""

    source: str
    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class Holder:
    """One place that holds blocks: a worker's device pool, a node's DRAM or disk, or the shared store."""

    owner: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """How the reusable prefix reaches the prefill worker.

    The first `local_tokens` already lie in its device pool; `fetched_tokens` more are pulled or restored from `source`;
    the rest of the prompt is computed.
    """

    local_tokens: int = 0
    fetched_tokens: int = 0
    source: Holder | None = None
    relay: WorkerId | None = None  # decode worker whose storage link reads on behalf of the prefill worker (DualPath)

    @property
    def reused_tokens(self) -> int:
        return self.local_tokens + self.fetched_tokens


@dataclass(frozen=True, slots=True)
class TTFTEstimate:
    """Predicted time to first token on one prefill worker, by term, with its interval.

    `handover_s` is the part of `transfer_s` that follows the prefill: where the first token leaves the decode worker, the rest
    of the hand-over and the first decode step.
    """

    queue_s: float
    transfer_s: float
    prefill_s: float
    low_s: float
    high_s: float
    calibrated: bool
    handover_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.queue_s + self.transfer_s + self.prefill_s

    @property
    def work_s(self) -> float:
        """How long the request keeps its prefill worker."""
        return self.transfer_s - self.handover_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """One prefill worker as a decision saw it."""

    worker: WorkerId
    reuse: ReusePlan
    ttft: TTFTEstimate
    score: float


class RejectReason(StrEnum):
    """Why a request was refused; the machine-readable word of the HTTP error."""

    TTFT_SLO = "ttft_slo"
    TBT_SLO = "tbt_slo"
    OVERLOAD = "overload"
    NO_PREFILL = "no_prefill_worker"
    NO_DECODE = "no_decode_worker"
    TOO_LONG = "too_long"
    QUEUE_FULL = "queue_full"
    RETRIES_EXHAUSTED = "retries_exhausted"


@dataclass(frozen=True, slots=True)
class Placement:
    """An accepted request: where it prefills, where it decodes, what it reuses, what was predicted."""

    request_id: RequestId
    attempt: int
    prefill: WorkerId
    decode: WorkerId | None
    reuse: ReusePlan
    ttft: TTFTEstimate
    tbt_s: float | None


@dataclass(frozen=True, slots=True)
class Rejection:
    """A refused request. Built in `admission.py` and nowhere else."""

    request_id: RequestId
    reason: RejectReason
    message: str
    retry_after_s: float
    best_worker: WorkerId | None = None
    predicted_s: float | None = None
    predicted_low_s: float | None = None
    predicted_high_s: float | None = None
    objective_s: float | None = None
    shortfall_s: float | None = None


Decision: TypeAlias = Placement | Rejection


class FinishReason(StrEnum):
    """How a request's life ended on the worker side."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_natural(self) -> bool:
        """Whether the output is complete."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


class TransferReason(StrEnum):
    """Why blocks move outside a request's own prefill and hand-over."""

    REPLICATE = "replicate"
    DRAIN = "drain"
