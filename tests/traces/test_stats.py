"""Statistics of traces: exact hit ratios against brute force, and the published trace's figures."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.builders import PUBLISHED, needs_published, request_of
from traces import reuse
from traces.formats import open_trace
from traces.reuse import EVICTION_RANKS, RankedCache, ReuseAnalysis, TooManyBlocks
from traces.schema import TraceRequest
from traces.stats import ModelShape, StatsOptions, arrivals, collect

prompts = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True), min_size=1, max_size=30)
CAPACITIES = (1, 2, 3, 5, 8, 13, 100)


def lru_hits(trace: list[list[int]], capacity: int) -> int:
    """Contiguous hits of an LRU, block by block."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in trace:
        unbroken = True
        for block in ids:
            unbroken = unbroken and block in cache
            hits += unbroken
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


def ranked_hits(trace: list[list[int]], capacity: int, policy: str) -> int:
    """Contiguous hits of a cache that looks at every block before it evicts one."""
    cache: dict[int, tuple[int, int, int]] = {}
    hits = tick = 0
    for ids in trace:
        unbroken = True
        for position, block in enumerate(ids):
            tick += 1
            unbroken = unbroken and block in cache
            hits += unbroken
            if block not in cache and len(cache) == capacity:
                del cache[min(cache, key=lambda each: key_of(policy, cache[each]))]
            cache[block] = (cache.get(block, (0, 0, 0))[0] + 1, position, tick)
    return hits


def key_of(policy: str, state: tuple[int, int, int]) -> tuple[int, ...]:
    uses, position, tick = state
    return (uses, tick) if policy == "lfu" else (uses, -position, tick)


@settings(max_examples=200)
@given(prompts)
def test_lru_curve_equals_brute_force_at_every_capacity(trace: list[list[int]]) -> None:
    analysis = ReuseAnalysis()
    for ids in trace:
        analysis.add(request_of(ids))
    blocks = sum(map(len, trace))
    expected = [lru_hits(trace, capacity) / blocks for capacity in CAPACITIES]
    assert expected == [block_ratio for block_ratio, _ in analysis.lru_hit_ratios(CAPACITIES)]


@settings(max_examples=100)
@given(prompts, st.sampled_from(sorted(EVICTION_RANKS)))
def test_other_policies_equal_brute_force(trace: list[list[int]], policy: str) -> None:
    for capacity in CAPACITIES:
        cache = RankedCache(capacity, EVICTION_RANKS[policy])
        for ids in trace:
            cache.add(request_of(ids))
        assert ranked_hits(trace, capacity, policy) == cache.hit_blocks


def test_tokens_count_the_partial_block_as_far_as_it_goes() -> None:
    found = collect([request_of([1, 2], tail_tokens=100), request_of([1, 2], tail_tokens=100)]).reuse
    assert found is not None
    assert (found.block_hit_ratio, found.token_hit_ratio) == (0.5, 0.5)


def test_an_infinite_cache_reuses_the_whole_of_a_repeated_prompt() -> None:
    analysis = ReuseAnalysis()
    reused = [analysis.add(request_of([1, 2], tail_tokens=100)) for _ in range(2)]
    assert reused == [0, 612]


def test_a_hit_needs_every_block_before_it() -> None:
    found = collect([request_of([1, 2, 3]), request_of([9, 2, 3])]).reuse
    assert found is not None
    assert found.block_hit_ratio == 0.0


def test_retention_window_keeps_all_but_the_share_that_it_may_lose() -> None:
    """Reuses after 1, 2, ... 10 seconds: nine tenths are kept for nine seconds."""
    times = [0.0]
    for pause in range(1, 11):
        times.append(times[-1] + pause)
    trace = [TraceRequest(time, 512, 1, (1,), traffic_class="agent") for time in times]
    found = collect(trace, StatsOptions(loss_share=0.1)).reuse
    assert found is not None
    [agent] = found.reuse_times
    assert (agent.traffic_class, agent.hit_blocks, agent.retention_s) == ("agent", 10, 9.0)
    assert (agent.share_by_window_s["1"], agent.share_by_window_s["10"]) == (0.1, 1.0)


def test_traces_without_identity_have_no_reuse() -> None:
    found = collect([TraceRequest(0.0, 10, 1), TraceRequest(1.0, 20, 3)])
    assert None is found.reuse
    assert (found.input_tokens.mean, found.output_tokens.mean) == (15.0, 2.0)


def test_one_request_has_no_rate() -> None:
    found = arrivals([5.0], 100)
    assert (found.duration_s, found.requests_per_s, found.interval_cv, found.dispersion) == (0.0, None, None, None)


def test_even_arrivals_are_less_bursty_than_poisson_and_clumps_more() -> None:
    even = arrivals([float(second) for second in range(600)], 1)
    clumps = arrivals([float(second // 100 * 100) for second in range(600)], 1)
    assert even.interval_cv == pytest.approx(0.0)
    assert even.dispersion == pytest.approx(0.0, abs=0.1)
    assert clumps.interval_cv is not None
    assert clumps.interval_cv > 5
    assert clumps.dispersion is not None
    assert clumps.dispersion > 5


def test_equation_1_saves_a_twelfth_less_than_it_prefills_at_128k() -> None:
    """95 % reuse of 128k tokens saves 91.5 % of the compute (the paper measures 92 % of the time)."""
    model = ModelShape()
    assert model.layer_flops(round(0.95 * 131_072)) / model.layer_flops(131_072) == pytest.approx(0.915, abs=0.002)


def test_a_trace_with_too_many_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "MAX_DISTINCT_BLOCKS", 3)
    with pytest.raises(TooManyBlocks, match="distinct blocks exceed 3; allowed: fewer"):
        collect([request_of([1, 2, 3, 4])])


@needs_published
def test_published_conversation_trace_has_the_known_figures() -> None:
    """Hit ratios, LRU curve and compute saved of the public file, as recomputed from it before."""
    assert PUBLISHED is not None
    capacities = (1_000, 5_859, 10_000, 30_000, 50_000, 100_000)
    found = collect(open_trace(PUBLISHED), StatsOptions(capacities, policies=()))
    assert found.reuse is not None
    assert (found.requests, found.reuse.blocks, found.reuse.distinct_blocks) == (12_031, 288_500, 182_790)
    assert tuple(
        round(each, 3) for each in (found.reuse.block_hit_ratio, found.reuse.token_hit_ratio, found.reuse.compute_saved)
    ) == (0.366, 0.374, 0.352)
    assert [round(each.block_hit_ratio, 3) for each in found.reuse.capacities] == [0.044, 0.136, 0.211, 0.326, 0.355, 0.364]
