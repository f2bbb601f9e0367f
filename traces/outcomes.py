"""What a replay hands back, live or simulated alike: one outcome a request, and the run around them.

Times are seconds on the replay's own clock, which starts with the first measured request. TTFT counts from the moment the
request was sent; how late that was after the moment the trace asked for is `lag_s`. TBT is Mooncake's: the mean of the
longest tenth of a request's gaps between tokens (FAST'25, section 5.1); TPOT is the mean gap. A value that was not
observed is None and stays out of every mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import numpy as np

from conductor.core.types import SLO

Plain: TypeAlias = str | int | float | bool | None
LONGEST_GAPS_SHARE = 0.1


class OutcomeStatus(StrEnum):
    """How a request ended; every request that a replay has taken from the trace has exactly one."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    UNFINISHED = "unfinished"  # still in flight, or not yet sent, when the replay was stopped


class RunMode(StrEnum):
    LIVE = "live"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What became of one request. `reason` says why it was rejected or failed.

    `wasted_prefill_tokens` were computed for a request that did not complete. `falsely_rejected` is known only where the
    truth is: in a simulation that follows up what would have become of it.
    """

    index: int
    due_s: float
    input_tokens: int
    status: OutcomeStatus
    sent_s: float | None = None
    warmup: bool = False
    ttft_s: float | None = None
    tbt_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    output_tokens: int = 0
    reused_tokens: int | None = None
    predicted_ttft_s: float | None = None
    reason: str | None = None
    wasted_prefill_tokens: int = 0
    falsely_rejected: bool | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    traffic_class: str | None = None

    @property
    def lag_s(self) -> float | None:
        """How late the replay sent the request."""
        return None if self.sent_s is None else max(0.0, self.sent_s - self.due_s)

    def meets(self, slo: SLO) -> bool:
        """Completed within both objectives. A request of one token has no gaps and so meets any TBT."""
        in_time = slo.ttft_s is None or (self.ttft_s is not None and self.ttft_s <= slo.ttft_s)
        steady = slo.tbt_s is None or self.tbt_s is None or self.tbt_s <= slo.tbt_s
        return self.status is OutcomeStatus.COMPLETED and in_time and steady


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Load of both pools at one moment, as the scheduler's admission sees it (1.0: at the objective)."""

    time_s: float
    prefill_load: float
    decode_load: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """One replay. `outcomes` are in trace order and complete: nothing that was taken from the trace is missing.

    `wall_s` is real time; None where the run must be byte-identical when repeated. `replicas` counts, for the most used
    blocks by rank, the holders at the end; `holders` are those of the most spread blocks by rank, over time. `gpus` is the
    size of the cluster, for throughput per GPU; `prefill_busy_s` is the time that its workers computed prompts, together.
    """

    mode: RunMode
    trace: str
    slo: SLO
    outcomes: Sequence[RequestOutcome]
    duration_s: float
    wall_s: float | None
    settings: Mapping[str, Plain] = field(default_factory=dict)
    gpus: int | None = None
    bytes_moved: Mapping[str, int] = field(default_factory=dict)
    replicas: Mapping[str, float] = field(default_factory=dict)
    holders: Mapping[int, Sequence[int]] = field(default_factory=dict)
    load_max_over_mean: float | None = None
    prefill_busy_s: float | None = None
    loads: Sequence[LoadSample] = ()
    interrupted: bool = False
    read_report: Mapping[str, object] | None = None


def mooncake_tbt_s(gaps_s: Sequence[float]) -> float | None:
    """Mean of the longest tenth of `gaps_s` (at least one); None without gaps."""
    if not gaps_s:
        return None
    longest = max(1, math.ceil(len(gaps_s) * LONGEST_GAPS_SHARE))
    return float(np.sort(np.asarray(gaps_s))[-longest:].mean())


def load_max_over_mean(outcomes: Sequence[RequestOutcome]) -> float | None:
    """Prompt tokens that the busiest prefill worker computed, over the mean of those that are named; None without names."""
    computed: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.prefill_worker is not None and not outcome.warmup:
            computed[outcome.prefill_worker] += outcome.input_tokens - (outcome.reused_tokens or 0)
    if not computed.total():
        return None
    return max(computed.values()) * len(computed) / computed.total()
