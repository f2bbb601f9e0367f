"""What a worker that leaves hands on, to whom, and what stops it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.core.cluster_view import ClusterView
from conductor.core.commands import Command, TransferBlocks
from conductor.core.config import MigrationConfig
from conductor.core.departures import COPIES_AT_ONCE, LOOKS_AT_ONCE, PAUSE_S, POOL_SHARE, Departures
from conductor.core.events import RequestCancelled, TransferFailed, TransferFinished, WorkerDraining, WorkerJoined, WorkerLost
from conductor.core.prefix_index import PrefixIndex
from conductor.core.types import Holder, InvariantError, Request, Role, Tier, TransferReason
from tests.core.builders import AT_ONCE, PROFILE, Drive, blocks, cluster, drive, request, worker
from tests.core.test_migration import BUDGET, HEAD, hot

NODE = {Tier.DEVICE: 10_000, Tier.HOST: 10_000}


def copies(commands: list[Command]) -> list[TransferBlocks]:
    return [command for command in commands if isinstance(command, TransferBlocks)]


def drain(driven: Drive, name: str = "p0") -> list[TransferBlocks]:
    return copies(driven(WorkerDraining(name)))


def seen(count: int, holder: str = "p0", **changes: object) -> Drive:
    """`holder` has so many prompts, all of them asked for a moment ago; without a budget for the replicator."""
    driven = drive(AT_ONCE, cluster(prefill=3, **changes))
    for number in range(count):
        ask(driven, request(f"r{number}"), holder)
    return driven


def ask(driven: Drive, one: Request, holder: str = "p0") -> None:
    """`holder` has the prompt of a request, which is decided and then cancelled."""
    driven.store(holder, one.block_hashes)
    driven.place(one)
    driven(RequestCancelled(one.id))


@pytest.mark.parametrize("migration", [MigrationConfig(), replace(BUDGET, budget_bytes_per_s=1.0)])
def test_what_only_it_holds_goes_to_another_worker(migration: MigrationConfig) -> None:
    """At once, whatever budget the replicator has."""
    driven = hot(migration)
    (copy,) = drain(driven)
    assert drain(driven) == [], "told twice, it copies once"
    assert (copy.source.owner, copy.blocks, copy.reason) == ("p0", HEAD, TransferReason.DRAIN)
    assert copy.target.owner in ("p1", "p2")
    assert [one["reason"] for one in driven.scheduler.copies_in_flight()] == ["drain"]
    driven(TransferFinished(copy.transfer_id, 1, 0.1))
    assert driven.scheduler.copies_in_flight() == []
    assert driven.scheduler._view._flows == {}


def test_what_others_hold_or_nobody_asked_for_is_not_handed_on() -> None:
    """Nor is there anywhere to hand it to when no other worker takes work, or of another model."""
    driven = hot()
    driven.store("p1", HEAD)
    assert drain(driven) == []
    assert drain(hot(times=0)) == []
    assert drain(hot(joins=cluster(prefill=1))) == []
    others = [*cluster(prefill=1), WorkerJoined(worker("p1", Role.PREFILL, model="another"), 1)]
    assert drain(hot(joins=others)) == []
    assert drain(hot(), "nobody") == []


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SHARED])
@pytest.mark.parametrize("neighbour", [True, False])
def test_a_lower_tier_that_stays_keeps_it(tier: Tier, neighbour: bool) -> None:
    """A host's memory stays with another worker of the host, the shared store in any case."""
    joins = cluster(prefill=2, capacity_blocks=NODE)
    if neighbour:
        joins.append(WorkerJoined(worker("p9", Role.PREFILL, node="node-p0", capacity_blocks=NODE), 1))
    driven = hot(joins=joins)
    driven.store("p0", HEAD, tier)
    assert bool(drain(driven)) == (tier is Tier.HOST and not neighbour)


def test_what_has_not_been_asked_for_in_a_long_time_is_left() -> None:
    """Ten half-lives of heat."""
    driven = seen(1)
    driven.now += 601.0
    assert drain(driven) == []


def test_over_a_link_that_is_too_slow_nothing_is_copied() -> None:
    """Computing 640 tokens takes 74 ms, and their 64 MB a second."""
    assert drain(seen(1, profile=replace(PROFILE, transfer_bytes_per_s=6.4e7))) == []


def test_a_decode_worker_hands_on_too() -> None:
    """It alone has the prompt once its prefill worker has evicted it."""
    driven = seen(1, holder="d0")
    (copy,) = drain(driven, "d0")
    assert (copy.source, copy.target.owner[0]) == (Holder("d0", Tier.DEVICE), "p")


def test_the_newest_goes_first_and_a_few_at_a_time() -> None:
    """The next begins when one has ended, well or not; what the target of one that failed was given is not tried again."""
    driven = seen(7)
    begun = drain(driven)
    assert [copy.blocks for copy in begun] == [request(f"r{number}").block_hashes for number in (6, 5, 4, 3)]
    for number, end in ((2, TransferFinished(begun[0].transfer_id, 1, 0.1)), (1, TransferFailed(begun[1].transfer_id, "down"))):
        (following,) = copies(driven(end))
        assert following.blocks == request(f"r{number}").block_hashes
        assert copies(driven(end)) == [], "told twice"
    assert len(driven.scheduler.copies_in_flight()) == COPIES_AT_ONCE


def test_turns_of_one_conversation_go_to_one_worker_once() -> None:
    """The longest, which is the newest, brings the others with it; a branch follows where its beginning went."""
    driven = drive(AT_ONCE, cluster(prefill=4))
    long, short = request("r1", tokens=1280, own=1, shared=5), request("r2", tokens=640, own=1, shared=5)
    branch = request("r3", tokens=640, own=7, shared=5)
    for one in (branch, short, long):
        ask(driven, one)
    begun = drain(driven)
    assert [copy.blocks for copy in begun] == [long.block_hashes, branch.block_hashes]
    assert len({copy.target.owner for copy in begun}) == 1


def test_who_has_most_of_it_is_given_the_rest() -> None:
    driven = seen(1)
    driven.store("p2", request("r0").block_hashes[:6])
    (copy,) = drain(driven)
    assert copy.target.owner == "p2"


def test_nobody_is_given_more_than_its_share() -> None:
    """Two prompts of ten blocks fit into half a pool of 40, and no third one; a worker that leaves as well is given none."""
    driven = seen(7, capacity_blocks={Tier.DEVICE: 40})
    drain(driven, "p2")
    given = drain(driven)
    while driven.scheduler.copies_in_flight():
        given += copies(driven(TransferFinished(driven.scheduler.copies_in_flight()[0]["transfer_id"], 1, 0.1)))
    assert [copy.target.owner for copy in given] == ["p1", "p1"]


def test_many_prompts_are_looked_at_in_turns() -> None:
    """Nothing is to be handed on of the newest hundred, so the first call ends before it comes to what is."""
    driven = seen(LOOKS_AT_ONCE + 5)
    for number in range(1, LOOKS_AT_ONCE + 5):
        driven.store("p1", request(f"r{number}").block_hashes)
    assert drain(driven) == []
    assert driven.scheduler.next_deadline() == pytest.approx(driven.now + PAUSE_S)
    (copy,) = copies(driven.settle(at=driven.now + PAUSE_S))
    assert copy.blocks == request("r0").block_hashes


def test_a_lost_target_lets_the_next_begin_and_a_lost_source_ends_it() -> None:
    """Whatever was under way; and a worker that comes back under its name leaves no more."""
    driven = seen(6)
    begun = drain(driven)
    target = begun[0].target.owner
    driven(WorkerLost(target, 1))
    following = copies(driven.settle(at=driven.now + PAUSE_S))
    assert following
    assert all(copy.target.owner not in (target, "p0") for copy in following)
    driven(WorkerLost("p0", 1))
    assert driven.scheduler.copies_in_flight() == []
    assert driven.scheduler._view._flows == {}
    driven(*cluster(prefill=1))
    assert driven.scheduler.next_deadline() is None


def test_prompts_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By number and by blocks; a prompt that comes again counts once. `check()` holds the count."""
    monkeypatch.setattr("conductor.core.departures.MAX_BLOCKS", 35)
    index = PrefixIndex()
    departures = Departures(MigrationConfig(tracked_prefixes=4), ClusterView(index), index, 64)
    departures.observe((), 0.0)
    departures.observe((*blocks(3, 9), blocks(10, 1)[-1]), 0.0)  # ends as the first one below
    for number in (1, 2, 2, 3, 4, 5):
        departures.observe(blocks(10, number), 0.0)
        departures.check()
    assert list(departures._recent) == [blocks(10, number)[-1] for number in (3, 4, 5)]
    for number in range(6):
        departures.observe(blocks(1, 20 + number), 0.0)
    assert len(departures._recent) == 4
    departures._recent_blocks += 1
    with pytest.raises(InvariantError, match="blocks are remembered"):
        departures.check()


CHAINS = [blocks(12, name, shared=5 * (name % 2)) for name in range(8)]


@given(
    held=st.lists(
        st.tuples(st.sampled_from(("p0", "p0", "p1", "p2", "d0")), st.integers(0, 7), st.integers(1, 12)), max_size=20
    ),
    prompts=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 12)), max_size=20),
    room=st.sampled_from((40, 1000)),
    leaving=st.sampled_from(("p0", "d0")),
)
def test_afterwards_nothing_is_lost_that_there_is_room_for(
    held: list[tuple[str, int, int]], prompts: list[tuple[int, int]], room: int, leaving: str
) -> None:
    """Against plain sets: whoever stays holds as much of every prompt as the worker that left, or is full."""
    index = PrefixIndex()
    view = ClusterView(index)
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("p2", Role.PREFILL), ("d0", Role.DECODE)):
        view.join(worker(name, role, capacity_blocks={Tier.DEVICE: room}), 1)
    caches: dict[str, set[int]] = {name: set() for name in view.specs}
    for name, chain, depth in held:
        caches[name] |= set(CHAINS[chain][:depth])
        index.store(Holder(name, Tier.DEVICE), None, CHAINS[chain][:depth])
    departures = Departures(MigrationConfig(), view, index, 64)
    for chain, depth in prompts:
        departures.observe(CHAINS[chain][:depth], 0.0)
    given: dict[str, int] = dict.fromkeys(caches, 0)
    under_way = copies(departures.draining(WorkerDraining(leaving), 0.0))
    while under_way:
        assert len(under_way) <= COPIES_AT_ONCE
        copy = under_way.pop(0)
        name = copy.target.owner
        assert name != leaving
        assert set(copy.blocks) <= caches[leaving]
        given[name] += len(set(copy.blocks) - caches[name])
        caches[name] |= set(copy.blocks)
        index.store(copy.target, None, copy.blocks)
        under_way += copies(departures.ended(TransferFinished(copy.transfer_id, 1, 0.1), 0.0))
        departures.check()
    assert view._flows == {}
    assert max(given.values()) <= POOL_SHARE * room
    for chain, depth in prompts:
        wanted = {block for block in CHAINS[chain][:depth] if block in caches[leaving]}
        stays = any(wanted <= caches[name] for name in caches if name != leaving)
        assert stays or any(count + len(wanted) > POOL_SHARE * room for count in given.values())
