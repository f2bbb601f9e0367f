"""Large snapshots are taken in piece by piece: no call takes in more, and nothing is claimed that the source does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from conductor.core.commands import RequestSnapshot
from conductor.core.config import SchedulerConfig
from conductor.core.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    IndexSnapshot,
    RequestArrived,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from conductor.core.prefix_index import PrefixIndex
from conductor.core.scheduler import Scheduler
from conductor.core.types import SHARED_STORE, Holder, Role, Stamp, Tier
from tests.core.builders import Drive, blocks, cluster, placements, request, worker

CHAIN = blocks(40, name=11)
P0 = Holder("p0", Tier.DEVICE)
SHARED = Holder(SHARED_STORE, Tier.SHARED)


def driven(piece_blocks: int = 10) -> tuple[Drive, PrefixIndex]:
    index = PrefixIndex()
    config = SchedulerConfig(policy="conductor", snapshot_piece_blocks=piece_blocks)
    one = Drive(Scheduler(config, index=index))
    one(*cluster(2, 1))
    return one, index


def snapshot(held: Sequence[int], seq: int = 1, epoch: int = 1) -> IndexSnapshot:
    return IndexSnapshot(Stamp("p0", epoch, seq), {Tier.DEVICE: tuple(held)})


def take_in(one: Drive) -> list[int]:
    """Ticks at every deadline until there is none; how many blocks p0 had after each."""
    claims = []
    while (deadline := one.scheduler.next_deadline()) is not None:
        one.now = deadline
        one.scheduler.handle(Tick(), deadline)
        claims.append(one.scheduler._index.num_claims(P0))
    one.scheduler.check()
    return claims


def test_no_call_takes_in_more_than_a_piece() -> None:
    """Whatever the size of the snapshot; and in the end all of it is known."""
    one, index = driven(piece_blocks=8192)
    held = tuple(range(1, 150_001))
    one.scheduler.handle(snapshot(held), one.now)
    claims = [0, *take_in(one)]
    assert claims[-1] == len(held)
    assert max(after - before for before, after in pairwise(claims)) <= 8192
    assert index.match(held[:5000]).confirmed.max() == 5000


def test_a_small_snapshot_is_known_at_once() -> None:
    one, index = driven(piece_blocks=40)
    one(snapshot(CHAIN))
    assert index.num_claims(P0) == 40
    assert one.scheduler.next_deadline() is None


def test_a_cache_is_unknown_until_its_first_snapshot_is_in() -> None:
    """To the last piece; a later one takes nothing from that, a later life does. Reports without one say little."""
    one, _ = driven()
    scheduler = one.scheduler
    assert scheduler.unknown_caches() == {"p0", "p1", "d0"}
    one(snapshot(CHAIN[:10]), BlocksStored(Stamp("p1", 1, 1), Tier.DEVICE, None, CHAIN))
    assert scheduler.unknown_caches() == {"p1", "d0"}
    one(WorkerLost("p0", 1), WorkerJoined(worker("p0", Role.PREFILL), 2), snapshot(CHAIN, epoch=2))
    for _ in range(3):
        assert scheduler.unknown_caches() == {"p0", "p1", "d0"}
        one.now = scheduler.next_deadline() or 0.0
        scheduler.handle(Tick(), one.now)
    take_in(one)
    assert scheduler.unknown_caches() == {"p1", "d0"}
    one(snapshot(CHAIN, seq=2, epoch=2), WorkerLost("p1", 1))
    assert scheduler.unknown_caches() == {"d0"}


def test_what_a_lost_worker_had_yet_to_tell_is_asked_of_another_one() -> None:
    """Of a tier that both report on, once; not of a worker's own cache."""
    tiers = {Tier.DEVICE: 100, Tier.HOST: 100, Tier.SHARED: 100}
    one = Drive(Scheduler(SchedulerConfig(policy="conductor")))
    one(*(WorkerJoined(worker(f"p{number}", Role.PREFILL, node="n", capacity_blocks=tiers), 1) for number in range(4)))
    for name, held in (("p0", (Tier.HOST, Tier.SHARED)), ("p1", (Tier.DEVICE,)), ("p2", (Tier.SHARED, Tier.HOST))):
        one(IndexSnapshot(Stamp(name, 1, 1), {tier: CHAIN[:5] for tier in held}))
    assert one(WorkerLost("p1", 1)) == []
    assert one(WorkerLost("p0", 1)) == [RequestSnapshot("p2", 1)]
    one(IndexSnapshot(Stamp("p2", 1, 2), {Tier.SHARED: CHAIN[:3]}))
    assert [one.scheduler._index.num_claims(holder) for holder in (Holder("n", Tier.HOST), SHARED)] == [0, 3]
    assert one(WorkerLost("p2", 1)) == []
    assert one.scheduler._index.num_claims(SHARED) == 0


def test_what_is_told_meanwhile_waits_behind_the_snapshot() -> None:
    """Stored below a block of the last piece, removed from the first, and cleared: in the end index and truth agree (I14)."""
    one, index = driven()
    one(snapshot(CHAIN))
    more = blocks(44, name=11)[40:]
    assert one(BlocksStored(Stamp("p0", 1, 2), Tier.DEVICE, CHAIN[-1], more)) == []
    assert one(BlocksRemoved(Stamp("p0", 1, 3), Tier.DEVICE, more[2:])) == []
    assert one(BlocksStored(Stamp("p0", 1, 4), Tier.HOST, None, CHAIN[:3])) == []
    assert one(CacheCleared(Stamp("p0", 1, 5), Tier.HOST)) == []
    assert take_in(one) == [10, 20, 30, 42]
    assert index.match((*CHAIN, *more)).confirmed.max() == 42
    assert index.num_claims(Holder("node-p0", Tier.HOST)) == 0


def test_blocks_under_an_unknown_parent_are_noticed_when_the_snapshot_is_in() -> None:
    one, _ = driven()
    one(snapshot(CHAIN))
    one(BlocksStored(Stamp("p0", 1, 2), Tier.DEVICE, 999, (1000,)))
    told = [command for _ in range(4) for command in one(Tick(), at=one.scheduler.next_deadline())]
    assert told == [RequestSnapshot("p0", 1)]


def test_children_that_come_before_their_parents_are_no_prefix_yet() -> None:
    """A request in the middle of it counts on nothing that is not there from its first block on."""
    one, index = driven()
    one(snapshot(CHAIN[::-1]))
    for known in (0, 0, 0):
        one(Tick(), at=one.scheduler.next_deadline())
        assert index.match(CHAIN).confirmed.max() == known
    (placed,) = placements(one(RequestArrived(request("r1", tokens=40 * 64)), Tick()))
    assert placed.reuse.reused_tokens == 0
    take_in(one)
    assert index.match(CHAIN).confirmed.max() == 40
    assert not index._walked, "what is known from end to end is trusted again"


def test_a_later_snapshot_replaces_one_that_is_taken_in() -> None:
    """A report was lost meanwhile, and the source has been asked again."""
    one, index = driven()
    one(snapshot(CHAIN))
    one(Tick())
    assert one(BlocksStored(Stamp("p0", 1, 5), Tier.DEVICE, None, (1,))) == [RequestSnapshot("p0", 1)]
    assert one(BlocksRemoved(Stamp("p0", 1, 6), Tier.DEVICE, CHAIN[20:])) == []
    one(snapshot(CHAIN[:20], seq=6))
    assert take_in(one)[-1] == 20
    assert index.match(CHAIN).confirmed.max() == 20


def test_a_removal_is_believed_although_a_report_before_it_was_lost() -> None:
    """Behind a snapshot that is taken in, too; its source stays doubted until the next one."""
    one, index = driven()
    one(snapshot(CHAIN))
    one(BlocksStored(Stamp("p0", 1, 5), Tier.DEVICE, None, (1,)))
    one(BlocksRemoved(Stamp("p0", 1, 6), Tier.DEVICE, CHAIN[30:]))
    for _ in range(4):
        one(Tick(), at=one.now + 1e-3)
    assert index.match(CHAIN).confirmed.max() == 30
    assert index._walked


def test_two_snapshots_are_taken_in_one_after_the_other() -> None:
    one, index = driven()
    one(snapshot(CHAIN), IndexSnapshot(Stamp("p1", 1, 1), {Tier.DEVICE: CHAIN}))
    assert take_in(one) == [10, 20, 30, 40, 40, 40, 40, 40]
    assert index.num_claims(Holder("p1", Tier.DEVICE)) == 40


def test_a_life_that_ends_takes_its_snapshot_with_it() -> None:
    """Lost, or followed by a later life: nothing of it is claimed afterwards (I8)."""
    one, index = driven()
    one(snapshot(CHAIN))
    one(Tick())
    one(WorkerLost("p0", 1))
    assert one.scheduler.next_deadline() is None
    one(WorkerJoined(worker("p0", Role.PREFILL), 2), snapshot(CHAIN, epoch=2))
    one(Tick(), snapshot(CHAIN[:5], epoch=3))
    assert take_in(one) == []
    assert index.match(CHAIN).confirmed.max() == 5
