"""The shape of a trace in one pass: lengths, arrivals, and what a prefix cache could do for it.

Hit ratios count contiguous blocks from the first, in blocks and in tokens, for one pool over the whole trace: an upper
bound for any cluster. Compute saved follows equation 1 of the paper (FAST'25, section 5.2): attention grows with the
square of the prompt, so a reused prefix saves less than its share of tokens in long prompts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from traces.reuse import EVICTION_RANKS, RankedCache, ReuseAnalysis
from traces.schema import TraceRequest

DEFAULT_CAPACITIES_BLOCKS = (1_000, 10_000, 30_000, 50_000, 100_000)
DISPERSION_WINDOW_S = 60.0
REUSE_WINDOWS_S = (1.0, 10.0, 60.0, 300.0, 600.0, 1_800.0, 3_600.0, 86_400.0)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Constants of equation 1; those of LLaMA3-70B, the paper's example. The number of layers cancels out of any ratio."""

    hidden: int = 8192
    attention: int = 4
    linear: int = 22

    def layer_flops(self, tokens: int) -> float:
        """FLOPs of one layer's prefill of `tokens`."""
        return self.attention * tokens**2 * self.hidden + self.linear * tokens * self.hidden**2


LLAMA3_70B = ModelShape()


@dataclass(frozen=True, slots=True)
class StatsOptions:
    """What to compute. `loss_share` is the share of hits that the retention window may lose."""

    capacities_blocks: tuple[int, ...] = DEFAULT_CAPACITIES_BLOCKS
    policies: tuple[str, ...] = tuple(EVICTION_RANKS)
    loss_share: float = 0.01
    model: ModelShape = LLAMA3_70B


@dataclass(frozen=True, slots=True)
class Lengths:
    mean: float
    p50: float
    p90: float
    p99: float
    max: int


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`interval_cv` is 1 for a Poisson process; `dispersion` is the variance over the mean of arrivals in windows of
    `dispersion_window_s`, 1 for a Poisson process as well. None when the trace is too short to tell."""

    duration_s: float
    requests_per_s: float | None
    input_tokens_per_s: float | None
    distinct_times: int
    interval_cv: float | None
    dispersion: float | None
    dispersion_window_s: float = DISPERSION_WINDOW_S


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """Hit ratio of one policy at one capacity; in tokens only where it is known (LRU)."""

    policy: str
    capacity_blocks: int
    capacity_tokens: int
    block_hit_ratio: float
    token_hit_ratio: float | None


@dataclass(frozen=True, slots=True)
class ReuseTimes:
    """Of one traffic class: the share of an infinite cache's hits that a block kept for `window_s` after its last use still
    serves, and the shortest window that loses at most `loss_share` of them."""

    traffic_class: str
    hit_blocks: int
    share_by_window_s: dict[str, float]
    loss_share: float
    retention_s: float


@dataclass(frozen=True, slots=True)
class Reuse:
    """What an infinite cache would do, and lesser ones. `compute_saved` is equation 1's share of prefill FLOPs."""

    block_tokens: int
    blocks: int
    distinct_blocks: int
    block_hit_ratio: float
    token_hit_ratio: float
    compute_saved: float
    capacities: tuple[CapacityPoint, ...]
    reuse_times: tuple[ReuseTimes, ...]


@dataclass(frozen=True, slots=True)
class TraceStats:
    """Everything that is known of a trace; `reuse` is None when it has no prefix identity."""

    requests: int
    input_tokens: Lengths
    output_tokens: Lengths
    arrivals: Arrivals
    reuse: Reuse | None

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(slots=True)
class _Compute:
    """FLOPs of a layer, with and without reuse."""

    model: ModelShape
    whole: float = 0.0
    saved: float = 0.0

    def add(self, prompt_tokens: int, reused_tokens: int) -> None:
        self.whole += self.model.layer_flops(prompt_tokens)
        self.saved += self.model.layer_flops(reused_tokens)


def collect(trace: Iterable[TraceRequest], options: StatsOptions | None = None) -> TraceStats:
    """Statistics of a trace of at least one request. Raises TooManyBlocks when its blocks do not fit into memory."""
    options = options or StatsOptions()
    times_s, inputs, outputs = array("d"), array("q"), array("q")
    analysis = ReuseAnalysis()
    compute = _Compute(options.model)
    caches = {
        (policy, capacity): RankedCache(capacity, EVICTION_RANKS[policy])
        for policy in options.policies
        for capacity in options.capacities_blocks
    }
    block_tokens = 0
    for request in trace:
        times_s.append(request.timestamp_s)
        inputs.append(request.input_tokens)
        outputs.append(request.output_tokens)
        block_tokens = request.block_tokens
        if request.hash_ids:
            compute.add(request.input_tokens, analysis.add(request))
            for cache in caches.values():
                cache.add(request)
    reuse = None if analysis.blocks == 0 else _reuse(analysis, compute, caches, (block_tokens, options))
    return TraceStats(len(times_s), lengths(inputs), lengths(outputs), arrivals(times_s, sum(inputs)), reuse)


def lengths(values: Sequence[int]) -> Lengths:
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Lengths(float(np.mean(values)), p50, p90, p99, max(values))


def arrivals(times_s: Sequence[float], input_tokens: int) -> Arrivals:
    times = np.asarray(times_s)
    duration_s = float(times[-1] - times[0])
    intervals = np.diff(times)
    mean_interval_s = float(intervals.mean()) if intervals.size else 0.0
    return Arrivals(
        duration_s=duration_s,
        requests_per_s=len(times) / duration_s if duration_s else None,
        input_tokens_per_s=input_tokens / duration_s if duration_s else None,
        distinct_times=int(np.unique(times).size),
        interval_cv=float(intervals.std()) / mean_interval_s if mean_interval_s else None,
        dispersion=_dispersion(times - times[0], duration_s),
    )


def _dispersion(times: np.ndarray, duration_s: float) -> float | None:
    """Variance over mean of arrivals in whole windows; None with fewer than two windows."""
    windows = int(duration_s // DISPERSION_WINDOW_S)
    if windows < 2:
        return None
    counts = np.histogram(times, bins=windows, range=(0.0, windows * DISPERSION_WINDOW_S))[0]
    return float(counts.var() / counts.mean()) if counts.any() else None


def _reuse(
    analysis: ReuseAnalysis,
    compute: _Compute,
    caches: dict[tuple[str, int], RankedCache],
    context: tuple[int, StatsOptions],
) -> Reuse:
    block_tokens, options = context
    hit_tokens = sum(analysis.hits.tokens)
    lru = zip(options.capacities_blocks, analysis.lru_hit_ratios(options.capacities_blocks), strict=True)
    points = [CapacityPoint("lru", blocks, blocks * block_tokens, *ratios) for blocks, ratios in lru]
    points += [
        CapacityPoint(policy, blocks, blocks * block_tokens, cache.hit_ratio, None)
        for (policy, blocks), cache in caches.items()
    ]
    return Reuse(
        block_tokens=block_tokens,
        blocks=analysis.blocks,
        distinct_blocks=analysis.distinct_blocks,
        block_hit_ratio=len(analysis.hits.tokens) / analysis.blocks,
        token_hit_ratio=hit_tokens / analysis.tokens,
        compute_saved=compute.saved / compute.whole,
        capacities=tuple(points),
        reuse_times=_reuse_times(analysis, options.loss_share),
    )


def _reuse_times(analysis: ReuseAnalysis, loss_share: float) -> tuple[ReuseTimes, ...]:
    idle_s = np.frombuffer(analysis.hits.idle_s, dtype=np.float64)
    numbers = np.frombuffer(analysis.hits.traffic_class, dtype=np.int64)
    found = []
    for number, name in enumerate(analysis.classes):
        own = np.sort(idle_s[numbers == number])
        if own.size == 0:
            continue
        served = np.searchsorted(own, REUSE_WINDOWS_S, side="right") / own.size
        shares = {f"{window:g}": float(share) for window, share in zip(REUSE_WINDOWS_S, served, strict=True)}
        kept = min(own.size - 1, max(0, int(np.ceil(own.size * (1 - loss_share))) - 1))
        found.append(ReuseTimes(name, int(own.size), shares, loss_share, float(own[kept])))
    return tuple(found)
