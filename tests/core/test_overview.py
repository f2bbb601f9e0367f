"""What an operator sees of a scheduler at a glance, held against requests whose fate is known."""

from __future__ import annotations

import json

import pytest

from conductor.core import overview
from conductor.core.config import SchedulerConfig
from conductor.core.events import RequestFailed, RequestResumed
from conductor.core.types import SLO
from tests.core.builders import Drive, blocks, cluster, drive, request


def test_a_fresh_scheduler_has_an_empty_picture() -> None:
    """No division by nothing, and every worker is there."""
    picture = drive(joins=cluster(prefill=1, decode=1)).scheduler.overview(0.0)
    assert (picture["requests"], picture["window_s"], picture["decisions"], picture["estimates"]) == (0, 0.0, [], [])
    assert picture["workers"]["p0"]["tiers"] == {"device": {"blocks": 0, "capacity": 10_000}}
    assert sorted(picture["workers"]) == ["d0", "p0"]


def test_a_reused_prefix_is_hot_and_its_replicas_are_named(scheduler: Drive) -> None:
    """The block that the reuse ended in names it; a prompt that reuses nothing heats nothing."""
    scheduler.store("p0", blocks(10, shared=10))
    scheduler.store("p1", blocks(10, shared=10))
    placed = scheduler.place(request("r1", shared=10), at=1.0)
    scheduler.prefilled(placed, 1.1, reused=placed.reuse.reused_tokens)
    scheduler.place(request("r2"), at=2.0)
    (hot,) = scheduler.scheduler.overview(3.0)["hot_prefixes"]
    assert (hot["tokens"], hot["hits"], hot["last_hit_ago_s"]) == (9 * 64, 1, 2.0)
    assert hot["replicas"] == ["p0/device", "p1/device"]


def test_hits_are_those_that_happened_rather_than_those_promised(scheduler: Drive) -> None:
    """The placement counted on nine blocks and the worker had four."""
    scheduler.store("p0", blocks(10, shared=10))
    placed = scheduler.place(request(shared=10))
    assert placed.reuse.reused_tokens == 9 * 64
    scheduler.prefilled(placed, 0.2, reused=4 * 64)
    picture = scheduler.scheduler.overview(1.0)
    assert picture["workers"]["p0"]["reused_tokens"] == 4 * 64
    assert picture["hot_prefixes"][0]["tokens"] == 4 * 64


@pytest.mark.parametrize(
    ("slo", "verdict"),
    [
        (SLO(ttft_s=0.3, tbt_s=0.02), "met"),
        (SLO(ttft_s=0.1), "missed_ttft"),
        (SLO(ttft_s=0.3, tbt_s=0.005), "missed_tbt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_objectives_are_judged_on_what_came_of_a_request(slo: SLO, verdict: str) -> None:
    """First token after 0.2 s, the others 0.01 s apart."""
    driven = drive(SchedulerConfig(admission="none"))
    placed = driven.place(request(slo=slo))
    assert sum(driven.scheduler.overview(0.0)["objectives"].values()) == 0
    driven.prefilled(placed, 0.2, reused=0)
    driven.decoded(placed, output_tokens=11, step_s=0.01)
    picture = driven.scheduler.overview(1.0)
    assert {name: count for name, count in picture["objectives"].items() if count} == {verdict: 1}
    (estimate,) = picture["estimates"]
    assert (estimate["worker"], estimate["actual_s"]) == (placed.prefill, pytest.approx(0.2))
    assert estimate["predicted_s"] == pytest.approx(placed.ttft.total_s)


def test_refusals_are_counted_by_reason() -> None:
    driven = drive(joins=cluster(prefill=0))
    driven.arrive(request("r1"))
    driven.arrive(request("r2"))
    picture = driven.scheduler.overview(1.0)
    assert picture["rejections"] == {"no_prefill_worker": 2}
    assert picture["objectives"]["rejected"] == 2


def test_a_resumed_request_is_one_request_and_no_estimate(scheduler: Drive) -> None:
    """What it took until the continuation's first token says nothing about an estimate."""
    placed = scheduler.place(request())
    scheduler.prefilled(placed, 0.2, reused=0)
    scheduler(RequestFailed("r1", 1, placed.decode or "", "gone"), at=0.3)
    scheduler(RequestResumed(request(attempt=2, emitted_tokens=3)), at=0.4)
    picture = scheduler.scheduler.overview(1.0)
    assert (picture["requests"], picture["estimates"]) == (1, [])
    assert picture["decisions"][0]["attempt"] == 2


def test_only_the_last_decisions_are_told_in_full_newest_first() -> None:
    """Each with the choice before the others, as strict JSON."""
    driven = drive(joins=cluster(prefill=overview.CANDIDATES + 3))
    count = overview.DECISIONS + 5
    for number in range(count):
        driven.place(request(f"r{number}"), at=float(number))
    picture = driven.scheduler.overview(100.0)
    json.dumps(picture, allow_nan=False)
    assert picture["requests"] == count
    assert [row["request_id"] for row in picture["decisions"]] == [f"r{n}" for n in range(count)][
        : -overview.DECISIONS - 1 : -1
    ]
    newest = picture["decisions"][0]
    assert newest["ago_s"] == pytest.approx(100.0 - (count - 1))
    assert newest["candidates"][0]["chosen"]
    assert len(newest["candidates"]) == overview.CANDIDATES
    assert newest["candidates_left_out"] == 3
