"""Workers whose claims about their caches prove wrong, and how they are believed again."""

from __future__ import annotations

from dataclasses import replace

from conductor.core.commands import Command, RequestSnapshot
from conductor.core.config import SchedulerConfig
from conductor.core.events import IndexSnapshot, WorkerJoined, WorkerLost
from conductor.core.types import Role, Stamp, Tier
from tests.core.builders import PROFILE, Drive, blocks, cluster, drive, request, worker


def reuse(driven: Drive, name: str, share: float) -> list[Command]:
    """A request for the prefix that p0 claims, of which it really reuses a `share`."""
    placed = driven.place(request(name, shared=10))
    claimed = 9 * 64
    return driven.prefilled(placed, 0.001, reused=int(claimed * share))


def level(driven: Drive) -> str:
    return str(driven.scheduler.worker_belief()["p0"]["trust"])


def claiming() -> Drive:
    driven = drive(joins=cluster(prefill=1))
    driven.store("p0", blocks(10, shared=10))
    return driven


def test_a_worker_that_keeps_its_word_is_exact() -> None:
    driven = claiming()
    reuse(driven, "r1", 1.0)
    assert level(driven) == "exact"


def test_one_miss_is_forgiven_and_two_degrade() -> None:
    """Blocks may be evicted between decision and prefill; that alone is no false report."""
    driven = claiming()
    reuse(driven, "r1", 0.0)
    assert level(driven) == "exact"
    reuse(driven, "r2", 0.0)
    assert level(driven) == "degraded"


def test_a_degraded_worker_is_asked_for_everything_that_it_holds() -> None:
    """Once: the request that is on its way is not repeated."""
    driven = claiming()
    asked = [reuse(driven, f"r{number}", 0.0) for number in (1, 2, 3)]
    assert asked == [[], [RequestSnapshot("p0", 1)], []]


def test_nothing_is_fetched_on_the_word_of_a_degraded_worker() -> None:
    """Neither by the worker from itself, nor by others beyond what is believed of it."""
    driven = drive(SchedulerConfig(policy="conductor"), cluster(prefill=1, profile=replace(PROFILE, transfer_bytes_per_s=1e12)))
    driven.store("p0", blocks(10, shared=10))
    for name in ("r1", "r2"):
        placed = driven.place(request(name, shared=10))
        driven.prefilled(placed, 0.001, reused=0)
    placed = driven.place(request("r3", shared=10))
    assert (placed.prefill, placed.reuse.local_tokens, placed.reuse.fetched_tokens) == ("p0", 5 * 64, 0)
    driven(WorkerJoined(worker("p1", Role.PREFILL, profile=replace(PROFILE, transfer_bytes_per_s=1e12)), 1))
    placed = driven.place(request("r4", shared=10))
    assert (placed.prefill, placed.reuse.local_tokens, placed.reuse.fetched_tokens) == ("p1", 0, 5 * 64)


def test_the_claims_of_a_degraded_worker_are_discounted() -> None:
    """After two misses it is believed 64 percent: five of nine blocks."""
    driven = claiming()
    reuse(driven, "r1", 0.0)
    reuse(driven, "r2", 0.0)
    assert driven.place(request("r3", shared=10)).reuse.local_tokens == 5 * 64
    record = driven.scheduler.decision_record("r3")
    assert record is not None
    assert round(record["candidates"][0]["trust"], 2) == 0.64


def test_a_worker_that_keeps_its_word_again_recovers() -> None:
    """What counts is the claim, not the discounted prediction that it beats easily."""
    driven = claiming()
    reuse(driven, "r1", 0.0)
    reuse(driven, "r2", 0.0)
    levels = []
    for number in range(3, 9):
        reuse(driven, f"r{number}", 1.0)
        levels.append(level(driven))
    assert levels == ["degraded"] * 5 + ["exact"]
    assert driven.place(request("r9", shared=10)).reuse.local_tokens == 9 * 64


def test_a_snapshot_puts_the_claims_right() -> None:
    """What the snapshot does not hold is claimed no more, and so cannot be missed."""
    driven = claiming()
    reuse(driven, "r1", 0.0)
    reuse(driven, "r2", 0.0)
    driven(IndexSnapshot(Stamp("p0", 1, 9), {Tier.DEVICE: ()}))
    assert driven.scheduler._index.match(blocks(10, shared=10)).confirmed.max() == 0


def test_a_new_life_is_believed() -> None:
    driven = claiming()
    reuse(driven, "r1", 0.0)
    reuse(driven, "r2", 0.0)
    driven(WorkerLost("p0", 1), WorkerJoined(worker("p0", Role.PREFILL), 2))
    assert level(driven) == "exact"


def test_expected_blocks_are_no_claim() -> None:
    """A burst that was sent to one worker before it reported anything does not degrade it."""
    driven = drive(joins=cluster(prefill=1))
    placed = [driven.place(request(f"r{number}", shared=10)) for number in range(5)]
    for one in placed:
        driven.prefilled(one, 0.001, reused=0)
    assert level(driven) == "exact"
