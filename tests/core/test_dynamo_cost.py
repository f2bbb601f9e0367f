"""The published cost of Dynamo's router, in blocks."""

from __future__ import annotations

from conductor.core.commands import Reject
from conductor.core.config import SchedulerConfig
from conductor.core.events import WorkerDraining, WorkerJoined
from conductor.core.types import RejectReason, Role, Tier
from tests.core.builders import Drive, blocks, cluster, drive, request, worker

CONFIG = SchedulerConfig(policy="dynamo_cost")


def cost_of(driven: Drive, name: str) -> dict[str, float]:
    """The cost of each worker in the eyes of the request `name` that arrives next."""
    seen: dict[str, float] = {}
    policy = driven.scheduler._policy

    def watch(situation):  # type: ignore[no-untyped-def]
        choice = policy(situation)
        assert choice is not None
        seen.update(zip(choice.candidates.ids, choice.candidates.score.tolist(), strict=True))
        return choice

    driven.scheduler._policy = watch
    driven.place(request(name, shared=10, own=3))
    driven.scheduler._policy = policy
    return seen


def test_what_a_worker_holds_is_taken_off() -> None:
    """Ten blocks of prompt, nine of which are held: the last one always has to be computed."""
    driven = drive(CONFIG)
    driven.store("p0", blocks(10, shared=10))
    assert cost_of(driven, "r1") == {"p0": 1.0, "p1": 10.0}


def test_what_a_worker_still_has_to_prefill_is_added() -> None:
    """A hit does not outweigh a queue of more blocks than it saves."""
    driven = drive(CONFIG)
    driven.store("p0", blocks(10, shared=10))
    first = driven.place(request("r1", tokens=640, shared=10))
    assert first.prefill == "p0"
    assert cost_of(driven, "r2") == {"p0": 2.0, "p1": 10.0}


def test_lower_tiers_count_for_less() -> None:
    """Host 0.75 of a block, disk 0.25, each beyond what the tiers above hold."""
    tiers = {Tier.DEVICE: 1000, Tier.HOST: 1000, Tier.DISK: 1000}
    driven = drive(CONFIG, cluster(prefill=1, capacity_blocks=tiers))
    driven.store("p0", blocks(4, shared=10))
    driven.store("p0", blocks(6, shared=10), Tier.HOST)
    driven.store("p0", blocks(8, shared=10), Tier.DISK)
    assert cost_of(driven, "r1") == {"p0": 10 - 4 - 0.75 * 2 - 0.25 * 2}


def test_the_decode_worker_with_the_fewest_blocks_is_taken() -> None:
    """Two requests in a row decode on different workers."""
    driven = drive(CONFIG)
    assert {driven.place(request("r1")).decode, driven.place(request("r2")).decode} == {"d0", "d1"}


def test_a_coupled_engine_is_judged_by_both() -> None:
    """What decodes there counts against it, and the request stays."""
    driven = drive(CONFIG, [WorkerJoined(worker(name, Role.COUPLED), 1) for name in ("c0", "c1")])
    first = driven.place(request("r1"))
    driven.prefilled(first, 0.1)
    second = driven.place(request("r2"))
    assert first.prefill != second.prefill
    assert (first.prefill, second.prefill) == (first.decode, second.decode)


def test_equal_costs_spread_over_workers() -> None:
    """On an idle cluster the requests do not all go to the first worker."""
    chosen = {drive(CONFIG).place(request(f"r{number}")).prefill for number in range(20)}
    assert chosen == {"p0", "p1"}


def test_nobody_to_prefill_means_no_choice() -> None:
    """A request finds no worker when all of them drain."""
    driven = drive(CONFIG)
    driven(WorkerDraining("p0"), WorkerDraining("p1"))
    (refused,) = driven.arrive(request())
    assert isinstance(refused, Reject)
    assert refused.rejection.reason is RejectReason.NO_PREFILL
