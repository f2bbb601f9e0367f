"""Generated traces have the published means and hit ratios, whatever the seed."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from statistics import fmean

import pytest

from traces.agentic import AgenticWorkload
from traces.generate import WORKLOADS, generate
from traces.schema import TraceRequest
from traces.stats import StatsOptions, TraceStats, collect

PLAIN = StatsOptions(policies=())
PUBLISHED_MEANS = {"conversation": (12_035, 343), "toolagent": (8_596, 182), "synthetic": (15_325, 149)}
PUBLISHED_TOKEN_HITS = {"conversation": (0.40, 0.374), "toolagent": (0.59,), "synthetic": (0.66, 0.651)}
AGENTIC = sorted(name for name, workload in WORKLOADS.items() if isinstance(workload, AgenticWorkload))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", PUBLISHED_MEANS)
def test_lookalike_has_the_published_means_and_hit_ratio(name: str, seed: int) -> None:
    """Within 5 % of both means; within 3 points of the table's ratio and of the file's own where that is known."""
    found = stats(name, 3_000, seed)
    assert PUBLISHED_MEANS[name] == pytest.approx((found.input_tokens.mean, found.output_tokens.mean), rel=0.05)
    assert found.reuse is not None
    for published in PUBLISHED_TOKEN_HITS[name]:
        assert found.reuse.token_hit_ratio == pytest.approx(published, abs=0.03)


def test_conversation_lookalike_arrives_in_bursts_and_synthetic_does_not() -> None:
    """The published conversation trace has ten requests a distinct time; the synthetic one is Poisson."""
    conversation, synthetic = stats("conversation", 2_000, 0).arrivals, stats("synthetic", 2_000, 0).arrivals
    assert conversation.distinct_times < 250
    assert synthetic.distinct_times > 1_900
    assert synthetic.interval_cv == pytest.approx(1.0, abs=0.1)


def test_toolagent_has_two_hot_system_prompts() -> None:
    counts: dict[int, int] = defaultdict(int)
    for request in generate("toolagent", 1_000):
        counts[request.hash_ids[0]] += 1
    assert len(counts) == 2
    assert min(counts.values()) > 250


@pytest.mark.parametrize("name", AGENTIC)
def test_agentic_trajectories_have_the_published_means(name: str) -> None:
    """Turns, appended, generated, total and context tokens: within 5 % of DualPath's table; reuse within 3 points of 98.7 %."""
    workload = WORKLOADS[name]
    assert isinstance(workload, AgenticWorkload)
    trajectories = trajectories_of(list(generate(name, 25 * workload.turns, seed=5)))
    means = (
        fmean(len(turns) for turns in trajectories),
        fmean(fmean(appended(turns)) for turns in trajectories),
        fmean(turns[0].output_tokens for turns in trajectories),
        fmean(turns[-1].input_tokens + turns[-1].output_tokens for turns in trajectories),
        fmean(fmean(turn.input_tokens for turn in turns) for turns in trajectories),
    )
    published = (
        workload.turns,
        workload.append_tokens,
        workload.output_tokens,
        workload.total_tokens,
        workload.context_tokens,
    )
    assert published == pytest.approx(means, rel=0.05)
    reuse = stats(name, 25 * workload.turns, 5).reuse
    assert reuse is not None
    assert reuse.token_hit_ratio == pytest.approx(0.987, abs=0.03)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("requests", [1, 2, 61, 400])
def test_generated_requests_are_sound(name: str, requests: int) -> None:
    """As many as asked for, in order of time, one id a block, the same again from the same seed."""
    found = list(generate(name, requests, seed=3))
    assert requests == len(found)
    assert sorted(found, key=lambda request: request.timestamp_s) == found
    assert all(len(request.hash_ids) == -(-request.input_tokens // request.block_tokens) for request in found)
    assert all(len(set(request.hash_ids)) == len(request.hash_ids) for request in found)
    assert list(generate(name, requests, seed=3)) == found


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_ids_mean_equal_prefixes(name: str) -> None:
    """An id always follows the same id, as it names a whole prefix."""
    before: dict[int, int | None] = {}
    for request in generate(name, 500, seed=1):
        for previous, block in zip((None, *request.hash_ids), request.hash_ids, strict=False):
            assert previous == before.setdefault(block, previous)


def test_another_seed_gives_another_trace() -> None:
    assert list(generate("synthetic", 50, seed=0)) != list(generate("synthetic", 50, seed=1))


def test_unknown_workload_is_refused() -> None:
    with pytest.raises(ValueError, match="workload is 'chat'; allowed: conversation, toolagent"):
        generate("chat")


def stats(name: str, requests: int, seed: int) -> TraceStats:
    return collect(generate(name, requests, seed), PLAIN)


def trajectories_of(requests: list[TraceRequest]) -> list[list[TraceRequest]]:
    found: dict[str | None, list[TraceRequest]] = defaultdict(list)
    for request in requests:
        found[request.session].append(request)
    return list(found.values())


def appended(turns: list[TraceRequest]) -> list[int]:
    return [later.input_tokens - earlier.input_tokens - earlier.output_tokens for earlier, later in pairwise(turns)]
