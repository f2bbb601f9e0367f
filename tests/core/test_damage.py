"""`check()` notices damage wherever it is done, and names the invariant or the part that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest

from conductor.core.cluster_view import Flow
from conductor.core.config import SchedulerConfig
from conductor.core.events import RequestArrived, WorkerLost
from conductor.core.migration import Head
from conductor.core.scheduler import Scheduler
from conductor.core.types import InvariantError
from tests.core.builders import drive, request

Damage: TypeAlias = Callable[[Scheduler], object]


def of(part: str, **values: object) -> Damage:
    """Overwrite attributes of a part of the scheduler."""

    def damage(scheduler: Scheduler) -> None:
        target: object = scheduler
        for name in part.split("."):
            target = getattr(target, name)
        for name, value in values.items():
            setattr(target, name, value)

    return damage


def cells(pool: str, column: str, value: float) -> Damage:
    """Overwrite a column of a pool."""
    return lambda scheduler: getattr(getattr(scheduler._view, pool), column).fill(value)


def misfile(scheduler: Scheduler) -> None:
    state = scheduler._requests.get("r1")
    assert state is not None
    state.request = replace(state.request, id="r7")


def lose_placement(scheduler: Scheduler) -> None:
    state = scheduler._requests.get("r1")
    assert state is not None
    state.placement = None


def orphan_and_interrupt(scheduler: Scheduler) -> None:
    state = scheduler._requests.get("r1")
    assert state is not None
    scheduler._continuations.interrupted(state)
    scheduler._continuations.orphaned(state)


def over_close(scheduler: Scheduler) -> None:
    scheduler._view.close_flow(Flow("p8", "p9"))


def drop_from_order(scheduler: Scheduler) -> None:
    scheduler._line._order.clear()


def drop_expectation(scheduler: Scheduler) -> None:
    scheduler._index._expected._roots.clear()


def forget_worker(scheduler: Scheduler) -> None:
    del scheduler._view.specs["d1"]


def read_ahead(scheduler: Scheduler) -> None:
    scheduler._reports._logs["p0"].seq = 9


def outlive(scheduler: Scheduler) -> None:
    scheduler._reports._dead["p0"] = 5


def track_without_budget(scheduler: Scheduler) -> None:
    scheduler._migration._heads[1] = Head((1,), 1.0, 0.0)


def leak_a_row(scheduler: Scheduler) -> None:
    scheduler._books.timeline._free.pop()


def shuffle_rows(scheduler: Scheduler) -> None:
    pool = scheduler._view.prefill
    pool.ids = pool.ids[::-1]


def owe_a_snapshot(scheduler: Scheduler) -> None:
    scheduler._reports._asked["p0"] = None


def take_in_nothing(scheduler: Scheduler) -> None:
    scheduler._reports._intakes["p0"] = None


def give_up_a_stranger(scheduler: Scheduler) -> None:
    scheduler._line._untakeable_since_s["r9"] = 0.0


def keep_an_old_queue(scheduler: Scheduler) -> None:
    scheduler._view.prefill._queue_s = (0.0, np.full(2, 7.0))


def keep_an_old_step(scheduler: Scheduler) -> None:
    scheduler._view.decode._joined_step_s = (640, np.full(2, 7.0))


def shorten_column(scheduler: Scheduler) -> None:
    scheduler._view.prefill.trust = scheduler._view.prefill.trust[:1]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (of("_requests", arrived=99), "I1: 99 arrived"),
        (misfile, "filed under r1"),
        (lose_placement, "I10: r1 is in phase"),
        (orphan_and_interrupt, "wait for a continuation and have one"),
        (over_close, "closed more often than opened"),
        (drop_from_order, "1 requests wait, 0 are in order"),
        (drop_expectation, "I11: expected prefixes differ"),
        (forget_worker, "differ from the pools'"),
        (read_ahead, "beyond the highest sequence"),
        (outlive, "I8: p0 is followed in epoch 1, which is over"),
        (track_without_budget, "a replicator without budget"),
        (leak_a_row, "expected decodes and"),
        (shuffle_rows, "do not match the known workers"),
        (shorten_column, "column trust has 1 rows for 2 workers"),
        (cells("prefill", "jobs", 7), "7 jobs counted"),
        (owe_a_snapshot, "snapshots are owed by"),
        (take_in_nothing, "are taken in, those of"),
        (give_up_a_stranger, "are given up at"),
        (keep_an_old_queue, "queues, churn and bandwidths"),
        (keep_an_old_step, "are kept, but"),
        (cells("decode", "promised_batch", 7.0), "requests are promised"),
        (cells("prefill", "pending_s", -1.0), "s pending for"),
        (cells("prefill", "flows_in", -1.0), "negative number of transfers"),
        (cells("prefill", "storage_left_bytes", 7.0), "bytes are left on storage links"),
        (cells("decode", "reserved_blocks", 3.0), "I9: d0 counts"),
    ],
)
def test_check_notices_damage(damage: Damage, words: str) -> None:
    """Two requests run and one waits; then something goes wrong inside."""
    driven = drive(SchedulerConfig(policy="conductor"))
    driven.settle(RequestArrived(request("r1", tokens=6400)), RequestArrived(request("r2", tokens=6400)))
    driven(RequestArrived(request("r3")))
    damage(driven.scheduler)
    with pytest.raises(InvariantError, match=words):
        driven.scheduler.check()


def test_deaths_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """News of workers that were never seen does not fill the memory."""
    monkeypatch.setattr("conductor.core.block_reports.MAX_REMEMBERED_DEATHS", 10)
    driven = drive()
    for number in range(50):
        driven(WorkerLost(f"x{number}", 1))
    assert len(driven.scheduler._reports._dead) == 10
