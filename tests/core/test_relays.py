"""Decode workers read the shared store for prefill workers whose own storage link is busy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.core.cluster_view import ClusterView, Flow
from conductor.core.events import LoadReported, RequestCancelled, Tick, WorkerDraining, WorkerJoined, WorkerLost
from conductor.core.prefix_index import PrefixIndex
from conductor.core.types import SHARED_STORE, ReusePlan, Role, Tier, TierReport, WorkerLoad
from tests.core.builders import AT_ONCE, PROFILE, Drive, blocks, cluster, drive, request, worker

SHARED = replace(PROFILE, tier_bytes_per_s=(1e12, 0.0, 0.0, 5e9))
TIERS = {Tier.DEVICE: 10_000, Tier.SHARED: 10_000}
NBYTES = 9 * 64 * 100_000.0  # what a request of 640 tokens fetches: 11.5 ms over a storage link, 5.8 ms over the network
LINKS = st.sampled_from((1e9, 5e9, 2e10))


def stored(prefill: int = 1, decode: int = 2, **config: Any) -> Drive:
    """A cluster whose shared store holds the prompts of r1, r2 and r3; nothing else is cached anywhere."""
    driven = drive(replace(AT_ONCE, **config), cluster(prefill, decode, capacity_blocks=TIERS, profile=SHARED))
    for number in (1, 2, 3):
        driven.store("p0", blocks(10, number + 10), Tier.SHARED)
    return driven


def link_left(driven: Drive, worker_id: str = "p0") -> float:
    pool = driven.scheduler._view.prefill
    return float(pool.storage_left_bytes[pool.row[worker_id]])


def test_nobody_reads_for_a_worker_whose_link_is_idle() -> None:
    """The first prompt is read by its own prefill worker, although both decode workers idle."""
    driven = stored()
    placed = driven.place(request("r1"))
    assert (placed.reuse.source.owner if placed.reuse.source else None, placed.reuse.relay) == (SHARED_STORE, None)
    record = driven.scheduler.decision_record("r1")
    assert record is not None
    assert (record["reuse"]["relay"], record.get("relay")) == (None, None)


def test_a_busy_link_is_gone_round_over_the_requests_own_decode_worker() -> None:
    """23 ms over the own link against 11.5 + 5.8 ms: the record says so, and the estimate counts it."""
    driven = stored()
    driven.place(request("r1"))
    placed = driven.place(request("r2"))
    assert placed.reuse.relay == placed.decode
    assert placed.ttft.transfer_s == pytest.approx(NBYTES / 5e9 + NBYTES / 1e10)
    record = driven.scheduler.decision_record("r2")
    assert record is not None
    assert record["reuse"]["relay"] == placed.decode
    assert record["relay"] == pytest.approx(
        {
            "worker": placed.decode,
            "target": "p0",
            "own_read_s": 2 * NBYTES / 5e9,
            "relayed_read_s": NBYTES / 5e9 + NBYTES / 1e10,
            "own_left_bytes": NBYTES,
            "relay_left_bytes": 0.0,
        }
    )
    view = driven.scheduler._view
    assert view._flows == {Flow(SHARED_STORE, "p0"): 1, Flow(str(placed.decode), "p0"): 1}


@pytest.mark.parametrize("policy", ["conductor", "kvcache_centric"])
def test_relays_take_turns(policy: str) -> None:
    """The third read goes to the decode worker whose link is idle still, whoever decodes."""
    driven = stored(policy=policy)
    relays = [driven.place(request(f"r{number}")).reuse.relay for number in (1, 2, 3)]
    assert relays[0] is None
    assert sorted(str(relay) for relay in relays[1:]) == ["d0", "d1"]


def test_a_prompt_that_is_nowhere_has_no_relay() -> None:
    """While others read."""
    driven = stored()
    driven.place(request("r1"))
    assert driven.place(request("r9")).reuse == ReusePlan()


def test_a_read_counts_until_the_prefill_begins_or_the_request_ends() -> None:
    """And no longer: the next prompt is read by its own worker again."""
    driven = stored()
    first = driven.place(request("r1"))
    assert link_left(driven) == NBYTES
    driven.prefilled(first, 0.01)
    assert link_left(driven) == 0.0
    driven.place(request("r2"))
    driven(RequestCancelled("r2"))
    assert link_left(driven) == 0.0
    assert driven.place(request("r3")).reuse.relay is None


def test_a_read_that_should_be_over_counts_no_more() -> None:
    """The second of two waits for the first: 11.5 and 23 ms; nothing else was heard of them."""
    driven = stored(relayed_reads="never")
    driven.place(request("r1"))
    driven.place(request("r2"))
    for at, left in ((0.0114, 2.0), (0.0116, 1.0), (0.0229, 1.0), (0.0231, 0.0)):
        driven(Tick(), at=at)
        assert link_left(driven) == left * NBYTES


def test_a_relay_that_is_lost_interrupts_no_request_that_does_not_decode_there() -> None:
    """The prefill worker reads by itself then; what was counted on the relay's link is given back all the same."""
    driven = stored()
    for number in (1, 2):
        driven.place(request(f"r{number}"))
    third = driven.place(request("r3"))
    driven(RequestCancelled("r2"), RequestCancelled("r1"))
    relay = third.reuse.relay
    assert relay is not None
    others = driven(WorkerLost(relay, 1))
    assert bool(others) == (third.decode == relay)
    driven(RequestCancelled("r3"))
    assert not driven.scheduler._view.storage.busy
    assert driven.scheduler._view._flows == {}


def test_a_worker_that_joins_a_busy_host_knows() -> None:
    """Reads of the other workers of its host are counted."""
    driven = stored()
    driven.place(request("r1"))
    driven(WorkerJoined(worker("p9", Role.PREFILL, node="node-p0", capacity_blocks=TIERS, profile=SHARED), 1))
    assert link_left(driven, "p9") == NBYTES


@pytest.mark.parametrize(
    "why_not", ["nothing", "never", "same host", "draining", "coupled", "no store", "network is slow", "no room"]
)
def test_nobody_reads_where_nobody_may_or_it_would_be_later(why_not: str) -> None:
    """Where nothing speaks against it, `d0` does."""
    profile = replace(SHARED, transfer_bytes_per_s=1e9) if why_not == "network is slow" else SHARED
    role = Role.COUPLED if why_not == "coupled" else Role.DECODE
    room = {**TIERS, Tier.DEVICE: 15} if why_not == "no room" else TIERS
    other = worker("d0", role, capacity_blocks=room, profile=PROFILE if why_not == "no store" else profile)
    joins = [
        WorkerJoined(worker("p0", Role.PREFILL, capacity_blocks=TIERS, profile=profile, node="node-p0"), 1),
        WorkerJoined(replace(other, node="node-p0") if why_not == "same host" else other, 1),
        WorkerJoined(worker("d1", Role.DECODE, capacity_blocks=TIERS, profile=PROFILE, node="node-d1"), 1),
    ]
    driven = drive(
        replace(AT_ONCE, relayed_reads="never" if why_not == "never" else "other_host", policy="kvcache_centric"), joins
    )
    for number in (1, 2, 3):
        driven.store("p0", blocks(10, number + 10), Tier.SHARED)
    if why_not == "draining":
        driven(WorkerDraining("d0"))
    if why_not == "no room":
        driven.scheduler._view.decode.reserve("d0", "other", 10, 640)
    driven.place(request("r1"))
    assert driven.place(request("r2")).reuse.relay == ("d0" if why_not == "nothing" else None)


def test_on_one_machine_every_worker_may_count_as_a_host() -> None:
    """`other_worker`: for tests."""
    joins = cluster(1, 1, capacity_blocks=TIERS, profile=SHARED, node="one")
    driven = drive(replace(AT_ONCE, relayed_reads="other_worker"), joins)
    for number in (1, 2):
        driven.store("p0", blocks(10, number + 10), Tier.SHARED)
    assert [driven.place(request(f"r{number}")).reuse.relay for number in (1, 2)] == [None, "d0"]


def test_a_decode_workers_link_is_as_fast_as_it_has_read() -> None:
    """One that turns out slow is not worth the way; other tiers, and prefill workers, say nothing of it."""
    driven = stored(decode=1)
    slow = TierReport(tier=Tier.SHARED, read_bytes_per_s=1e8)
    driven(LoadReported("d0", 1, WorkerLoad(), (replace(slow, tier=Tier.DISK),)))
    driven(LoadReported("p0", 1, WorkerLoad(), (replace(slow, read_bytes_per_s=5e9),)))
    driven.place(request("r1"))
    assert driven.place(request("r2")).reuse.relay == "d0"
    driven(RequestCancelled("r2"), LoadReported("d0", 1, WorkerLoad(), (slow,)))
    assert driven.place(request("r3")).reuse.relay is None


def read_s(view: ClusterView, prefill: str, decode: str | None, nbytes: float, left: dict[str, float]) -> float:
    """By hand, for one pair."""
    target = view.specs[prefill]
    if decode is None:
        return (left.get(target.node, 0.0) + nbytes) / target.profile.tier_bytes_per_s[Tier.SHARED]
    relay, groups = view.specs[decode], target.profile.layer_groups
    read = (left.get(relay.node, 0.0) + nbytes) / relay.profile.tier_bytes_per_s[Tier.SHARED]
    passed = nbytes / min(
        target.nic_bytes_per_s or math.inf, target.profile.transfer_bytes_per_s, relay.nic_bytes_per_s or math.inf
    )
    return (read + passed) / groups + (1 - 1 / groups) * max(read, passed)


@given(
    prefill=st.lists(st.tuples(st.integers(0, 3), LINKS, st.sampled_from((1, 4))), min_size=1, max_size=4),
    decode=st.lists(st.tuples(st.integers(0, 5), LINKS, st.sampled_from((None, 5e9))), min_size=1, max_size=4),
    reads=st.lists(st.tuples(st.integers(0, 7), st.sampled_from((1e6, 1e8, 3e8))), max_size=6),
    nbytes=st.sampled_from((1e6, 1e8)),
    beside=st.integers(0, 3),
)
def test_the_idlest_relay_of_another_host_is_taken_where_it_saves_time(
    prefill: list[tuple[int, float, int]],
    decode: list[tuple[int, float, float | None]],
    reads: list[tuple[int, float]],
    nbytes: float,
    beside: int,
) -> None:
    """Against every pair, one by one."""
    view = ClusterView(PrefixIndex())
    for number, (node, speed, groups) in enumerate(prefill):
        profile = replace(SHARED, tier_bytes_per_s=(1e12, 0.0, 0.0, speed), layer_groups=groups)
        view.join(worker(f"p{number}", Role.PREFILL, node=f"n{node}", profile=profile, nic_bytes_per_s=1e10), 1)
    for number, (node, speed, nic) in enumerate(decode):
        profile = replace(SHARED, tier_bytes_per_s=(1e12, 0.0, 0.0, speed))
        view.join(worker(f"d{number}", Role.DECODE, node=f"n{node}", profile=profile, nic_bytes_per_s=nic), 1)
    names, left = [*view.prefill.ids, *view.decode.ids], dict[str, float]()
    for number, (reader, size) in enumerate(reads):
        name = names[reader % len(names)]
        view.storage.begin(f"r{number}", name, size, 0.0)
        left[view.specs[name].node] = left.get(view.specs[name].node, 0.0) + size
    view.check()
    own_decode = view.decode.ids[beside % len(decode)]
    estimates = view.storage.read_s(np.full(len(prefill), nbytes))
    for row, target in enumerate(view.prefill.ids):
        own_s, node = read_s(view, target, None, nbytes, left), view.specs[target].node
        waits = {
            one: left.get(view.specs[one].node, 0.0) / view.specs[one].profile.tier_bytes_per_s[Tier.SHARED]
            for one in view.decode.ids
            if view.specs[one].node != node
        }
        first = min(waits, key=lambda one: (waits[one], one), default=None)
        preferred = min(waits, key=lambda one: (waits[one], one != own_decode, one), default=None)
        chosen = view.storage.relay(row, nbytes, 1, own_decode)
        if node not in left or preferred is None or read_s(view, target, preferred, nbytes, left) >= own_s:
            assert chosen is None
        else:
            assert chosen is not None
            assert chosen.worker == preferred
            expected = own_s, read_s(view, target, preferred, nbytes, left)
            assert (chosen.own_read_s, chosen.relayed_read_s) == pytest.approx(expected)
        best_s = own_s if first is None or node not in left else min(own_s, read_s(view, target, first, nbytes, left))
        assert float(estimates[row]) == pytest.approx(best_s)
