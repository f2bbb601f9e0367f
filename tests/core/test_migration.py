"""The background replicator: which prefixes it copies, where to, and what keeps it from doing so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conductor.core.commands import Command, DropBlocks, TransferBlocks
from conductor.core.config import MigrationConfig, SchedulerConfig
from conductor.core.events import TransferFailed, TransferFinished, WorkerJoined, WorkerLost
from conductor.core.types import Holder, Role, Tier
from tests.core.builders import PROFILE, Drive, blocks, cluster, drive, request, worker

BUDGET = MigrationConfig(budget_bytes_per_s=1e9, min_heat=3.0)
HEAD = blocks(10, shared=10)


def hot(migration: MigrationConfig = BUDGET, joins: list[WorkerJoined] | None = None, times: int = 8, **spec: Any) -> Drive:
    """p0 holds a prefix that `times` requests have used, all of which are done."""
    config = SchedulerConfig(policy="local_cache_aware", migration=migration)
    driven = drive(config, cluster(prefill=3, **spec) if joins is None else joins)
    driven.store("p0", HEAD)
    for number in range(times):
        placed = driven.place(request(f"r{number}", tokens=700, shared=10))
        driven.prefilled(placed, 0.02)
        driven.decoded(placed, 5, 0.01)
    return driven


def round_of(driven: Drive, after_s: float = 1.0) -> list[Command]:
    return [c for c in driven.settle(at=driven.now + after_s) if isinstance(c, TransferBlocks | DropBlocks)]


def copies(commands: list[Command]) -> list[TransferBlocks]:
    return [command for command in commands if isinstance(command, TransferBlocks)]


def test_a_hot_prefix_is_copied_to_a_worker_without_it() -> None:
    (copy,) = copies(round_of(hot()))
    assert (Holder("p0", Tier.DEVICE), HEAD) == (copy.source, copy.blocks)
    assert copy.target.owner in ("p1", "p2")


def test_without_a_budget_nothing_is_copied_or_waited_for() -> None:
    """The default: copies follow demand alone."""
    driven = hot(MigrationConfig())
    assert (driven.scheduler.next_deadline(), round_of(driven)) == (None, [])


def test_a_prefix_that_few_ask_for_is_left_where_it_is() -> None:
    assert copies(round_of(hot(times=2))) == []


def test_heat_fades() -> None:
    """What was hot ten half-lives ago is not copied."""
    assert copies(round_of(hot(), after_s=600.0)) == []


def test_a_copy_larger_than_the_budget_waits_until_it_is_saved_up() -> None:
    """64 MB at 40 MB/s: not in the first round, but in the second."""
    driven = hot(replace(BUDGET, budget_bytes_per_s=4e7))
    assert [len(copies(round_of(driven))) for _ in range(2)] == [0, 1]


def test_a_copy_takes_of_the_budget_what_windows_let_travel() -> None:
    """Of the 64 MB of all layers 12.8 MB of the global ones and 10.24 MB of the window move: enough in the first round."""
    profile = replace(PROFILE, kv_window_bytes_per_token=80_000, kv_window_tokens=128)
    driven = hot(replace(BUDGET, budget_bytes_per_s=4e7), profile=profile)
    assert len(copies(round_of(driven))) == 1


def test_a_copy_that_costs_more_than_it_saves_is_not_made() -> None:
    """Over a link of 1 MB/s the transfer takes a minute for a prefill of less than a tenth of a second."""
    assert copies(round_of(hot(profile=replace(PROFILE, transfer_bytes_per_s=1e6)))) == []


def test_copies_spread_over_failure_domains() -> None:
    """p1 shares the zone of p0, p2 its rack as well, p3 is elsewhere."""
    places = {"p0": ("z1", "k1"), "p1": ("z1", "k2"), "p2": ("z1", "k1"), "p3": ("z2", "k9")}
    joins = [WorkerJoined(worker(name, Role.PREFILL, zone=z, rack=k), 1) for name, (z, k) in places.items()]
    driven = hot(joins=[*joins, WorkerJoined(worker("d0", Role.DECODE), 1)])
    (copy,) = copies(round_of(driven))
    assert copy.target.owner == "p3"
    driven(TransferFinished(copy.transfer_id, 1, 0.1))
    driven.store("p3", HEAD)
    assert [c.target.owner for c in copies(round_of(driven))] == ["p1"]


def test_no_copy_is_sent_over_a_busy_link() -> None:
    """While p0 hands a prompt over, it sends nothing else."""
    driven = hot()
    placed = driven.place(request("r50", tokens=700, shared=10))
    assert placed.prefill == "p0"
    driven.prefilled(placed, 0.02)
    assert copies(round_of(driven)) == []


def test_replicas_are_bounded() -> None:
    driven = hot(replace(BUDGET, max_replicas=2))
    (copy,) = copies(round_of(driven))
    assert copies(round_of(driven)) == []
    driven(TransferFinished(copy.transfer_id, 1, 0.1))
    driven.store(copy.target.owner, HEAD)
    assert copies(round_of(driven)) == []


def test_a_copy_that_failed_frees_its_links_and_is_tried_again() -> None:
    driven = hot()
    (copy,) = copies(round_of(driven))
    driven(TransferFailed(copy.transfer_id, "connection reset"))
    assert len(copies(round_of(driven))) == 1


def test_a_copy_to_a_lost_worker_is_forgotten() -> None:
    """Its links are free, and a late word about it changes nothing."""
    driven = hot()
    (copy,) = copies(round_of(driven))
    driven(WorkerLost(copy.target.owner, 1), TransferFinished(copy.transfer_id, 1, 0.1))
    assert driven.scheduler.copies_in_flight() == []


def test_cold_copies_are_given_up_and_the_original_stays() -> None:
    driven = hot()
    (copy,) = copies(round_of(driven))
    driven(TransferFinished(copy.transfer_id, 1, 0.1))
    driven.store(copy.target.owner, HEAD)
    assert DropBlocks(copy.target, HEAD) in round_of(driven, after_s=240.0)


def test_the_replicator_stops_asking_for_time_when_all_is_cold() -> None:
    driven = hot()
    round_of(driven, after_s=3600.0)
    assert driven.scheduler.next_deadline() is None


def test_a_copy_says_why_it_was_made() -> None:
    """It saves more prefill seconds a second than it costs."""
    driven = hot()
    round_of(driven)
    (why,) = driven.scheduler.copies_in_flight()
    assert (why["source"], why["blocks"]) == ("p0", 10)
    assert why["saved_s_per_s"] > why["cost_s_per_s"] > 0.0
