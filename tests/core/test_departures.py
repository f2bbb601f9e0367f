"""What a worker that leaves hands on, to whom, and what stops it."""

from __future__ import annotations

import math
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
@pytest.mark.parametrize("neighbour", [NODE, {Tier.DEVICE: 10_000}, None])
def test_a_lower_tier_that_stays_keeps_it(tier: Tier, neighbour: dict[Tier, int] | None) -> None:
    """A host's memory stays with another worker of the host that reads it, the shared store in any case."""
    joins = cluster(prefill=2, capacity_blocks=NODE)
    if neighbour is not None:
        joins.append(WorkerJoined(worker("p9", Role.PREFILL, node="node-p0", capacity_blocks=neighbour), 1))
    driven = hot(joins=joins)
    driven.store("p0", HEAD, tier)
    assert bool(drain(driven)) == (tier is Tier.HOST and neighbour is not NODE)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_what_only_its_host_keeps_goes_with_the_last_worker_of_it(tier: Tier) -> None:
    """The first one to leave the host leaves it there, even where its own pool has it as well."""
    keeping = {Tier.DEVICE: 10_000, Tier.HOST: 10_000, Tier.DISK: 10_000}
    joins = cluster(prefill=3, capacity_blocks=keeping)
    joins.append(WorkerJoined(worker("d9", Role.DECODE, node="node-p0", capacity_blocks=keeping), 1))
    driven = drive(AT_ONCE, joins)
    kept, pooled = request("r1").block_hashes, request("r2").block_hashes
    for number, held in ((1, kept), (2, pooled)):
        driven.store("p0", held, tier)
        driven.place(request(f"r{number}"))
        driven(RequestCancelled(f"r{number}"))
    driven.store("p0", pooled)
    assert drain(driven) == []
    found = drain(driven, "d9")
    assert [(copy.source, copy.blocks) for copy in found] == [(Holder("node-p0", tier), one) for one in (pooled, kept)]
    assert {copy.target.owner for copy in found} <= {"p1", "p2"}
    assert [one["source"] for one in driven.scheduler.copies_in_flight()] == ["d9", "d9"]
    driven(WorkerLost("d9", 1))
    assert driven.scheduler.copies_in_flight() == []


def test_what_lies_in_its_pool_goes_before_what_must_be_brought_up() -> None:
    """For that evicts; each lot the newest first."""
    driven = seen(0, capacity_blocks=NODE)
    prompts = [request(f"r{number}") for number in range(4)]
    for number, one in enumerate(prompts):
        if number in (1, 3):
            driven.store("p0", one.block_hashes, Tier.HOST)
        driven.store("p0", one.block_hashes[: 4 if number in (1, 3) else 10])
        driven.place(one)
        driven(RequestCancelled(one.id))
    order = [prompts[number].block_hashes for number in (2, 0, 3, 1)]
    sources = [Holder("p0", Tier.DEVICE)] * 2 + [Holder("node-p0", Tier.HOST)] * 2
    assert [(copy.source, copy.blocks) for copy in drain(driven)] == list(zip(sources, order, strict=True))


def test_what_is_read_more_slowly_than_it_is_computed_is_left_on_its_host() -> None:
    """640 tokens of 64 MB take 74 ms to compute, 6 ms to copy, and from such a disk 100 ms or 10 ms to bring up."""
    for disk_bytes_per_s, handed_on in ((6.4e8, False), (6.4e9, True)):
        profile = replace(PROFILE, tier_bytes_per_s=(1e12, 0.0, disk_bytes_per_s, 0.0))
        driven = drive(AT_ONCE, cluster(prefill=2, capacity_blocks={Tier.DEVICE: 10_000, Tier.DISK: 10_000}, profile=profile))
        driven.store("p0", request("r1").block_hashes, Tier.DISK)
        driven.place(request("r1"))
        driven(RequestCancelled("r1"))
        assert bool(drain(driven)) == handed_on


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
HOSTS = {"p0": "a", "p3": "a", "p1": "b", "p2": "c", "d0": "d"}
KEPT = {"p0": (Tier.HOST, Tier.DISK), "p3": (Tier.HOST,), "p1": (Tier.HOST,), "p2": (), "d0": (Tier.DISK,)}
HOLDERS = [Holder(name, Tier.DEVICE) for name in HOSTS] + [
    Holder(owner, tier) for owner, tier in (("a", Tier.HOST), ("a", Tier.DISK), ("b", Tier.HOST), ("d", Tier.DISK))
]


def readers(holder: Holder) -> set[str]:
    """Whoever can give what a holder has."""
    return {
        name for name, host in HOSTS.items() if name == holder.owner or (host == holder.owner and holder.tier in KEPT[name])
    }


@given(
    held=st.lists(st.tuples(st.sampled_from(HOLDERS), st.integers(0, 7), st.integers(1, 12)), max_size=20),
    prompts=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 12)), max_size=20),
    room=st.sampled_from((40, 1000)),
    leaving=st.sampled_from((("p0",), ("d0",), ("p3",), ("p0", "p3"), ("p3", "p0"), ("d0", "p1", "p0"), ("p0", "d0", "p3"))),
    one_by_one=st.booleans(),
)
def test_afterwards_nothing_is_lost_that_there_is_room_for(
    held: list[tuple[Holder, int, int]],
    prompts: list[tuple[int, int]],
    room: int,
    leaving: tuple[str, ...],
    one_by_one: bool,
) -> None:
    """Against plain sets: whoever stays holds as much of every prompt as anybody who left and any tier that was given up, or
    is full. Workers that leave do so at once, or each when the one before has handed everything on."""
    index = PrefixIndex()
    view = ClusterView(index)
    for name, host in HOSTS.items():
        capacity = {Tier.DEVICE: room, **dict.fromkeys(KEPT[name], 1000)}
        role = Role.DECODE if name == "d0" else Role.PREFILL
        view.join(worker(name, role, node=host, capacity_blocks=capacity), 1)
    caches: dict[Holder, set[int]] = {holder: set() for holder in HOLDERS}
    for holder, chain, depth in held:
        view.know_holder(holder)
        caches[holder] |= set(CHAINS[chain][:depth])
        index.store(holder, None, CHAINS[chain][:depth])
    departures = Departures(MigrationConfig(), view, index, 64)
    for chain, depth in prompts:
        departures.observe(CHAINS[chain][:depth], 0.0)
    given: dict[tuple[str, str], int] = {}
    under_way: list[TransferBlocks] = []
    gone: set[str] = set()
    now = 0.0

    def begin(commands: list[Command]) -> None:
        begun = copies(commands)
        assert not {copy.target.owner for copy in begun} & gone
        under_way.extend(begun)

    for name in leaving:
        gone.add(name)
        begin(departures.draining(WorkerDraining(name), now))
        while (one_by_one or name == leaving[-1]) and (under_way or departures.next_deadline() < math.inf):
            assert len(under_way) <= COPIES_AT_ONCE * len(gone)
            now += PAUSE_S
            begin(departures.round(now))
            if not under_way:
                continue
            copy = under_way.pop(0)
            (source,) = (one["source"] for one in departures.explain() if one["transfer_id"] == copy.transfer_id)
            target = copy.target.owner
            assert source in gone & readers(copy.source)
            assert set(copy.blocks) <= caches[copy.source]
            given[source, target] = given.get((source, target), 0) + len(set(copy.blocks) - caches[copy.target])
            caches[copy.target] |= set(copy.blocks)
            index.store(copy.target, None, copy.blocks)
            begin(departures.ended(TransferFinished(copy.transfer_id, 1, 0.1), now))
            departures.check()
    assert view._flows == {}
    assert max(given.values(), default=0) <= POOL_SHARE * room
    lost = [holder for holder in HOLDERS if readers(holder) <= gone]
    for chain, depth in prompts:
        for holder in lost:
            wanted = {block for block in CHAINS[chain][:depth] if block in caches[holder]}
            stays = any(wanted <= caches[other] for other in HOLDERS if other not in lost)
            assert stays or any(count + len(wanted) > POOL_SHARE * room for count in given.values())
