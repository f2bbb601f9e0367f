"""News that comes twice, out of turn or about somebody else, and what is tracked within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conductor.core.commands import ResumeRequest
from conductor.core.config import MigrationConfig
from conductor.core.decode_pool import DecodePool
from conductor.core.decode_timeline import DecodeTimeline
from conductor.core.events import LoadReported, RequestCancelled, RequestFinished, RequestResumed, WorkerJoined, WorkerLost
from conductor.core.scheduler import Scheduler
from conductor.core.types import FinishReason, InvariantError, Role, WorkerLoad
from tests.core.builders import AT_ONCE, drive, placements, request, worker
from tests.core.test_migration import BUDGET, copies, hot, round_of


def test_a_join_of_a_former_life_changes_nothing() -> None:
    """The later life stays, with all that is known of it."""
    driven = drive(AT_ONCE)
    driven(WorkerJoined(worker("p0", Role.PREFILL), 3))
    assert driven(WorkerJoined(worker("p0", Role.PREFILL, model="old"), 2)) == []
    assert driven.scheduler._view.epochs["p0"] == 3


def test_what_others_run_on_a_decode_worker_lengthens_its_steps() -> None:
    """A reported batch that is larger than what was placed there counts; a smaller one, or one of a former life, does not."""
    driven = drive(AT_ONCE)
    driven(LoadReported("d0", 1, WorkerLoad(decode_batch=20, decode_context_tokens=9000)))
    assert driven.place(request("r1")).decode == "d1"
    driven(LoadReported("d0", 1, WorkerLoad()), LoadReported("d0", 0, WorkerLoad(decode_batch=50)))
    assert driven.place(request("r2")).decode == "d0"


def test_queued_work_that_is_given_up_leaves_the_running_one_alone() -> None:
    """The second of two requests on a worker is cancelled; the first one's end stays where it was."""
    driven = drive(AT_ONCE)
    for name in ("r1", "r2", "r3"):
        driven.place(request(name, tokens=6400))
    before_s = driven.scheduler._view.prefill.queue_s(0.0).tolist()
    driven(RequestCancelled("r3"))
    assert sorted(before_s) == pytest.approx([0.65, 1.3])
    assert driven.scheduler._view.prefill.queue_s(0.0).tolist() == pytest.approx([0.65, 0.65])


def test_a_request_that_has_finished_is_not_recorded_as_cancelled() -> None:
    """The client hangs up after the last token."""
    driven = drive(AT_ONCE)
    placed = driven.place(request("r1"))
    driven.prefilled(placed, 0.07)
    driven(RequestFinished("r1", 1, 5, FinishReason.STOP), RequestCancelled("r1"))
    record = driven.scheduler.decision_record("r1")
    assert record is not None
    assert "cancelled" not in str(record)


def test_a_request_begins_to_decode_once() -> None:
    """Told again, or of a request without reservation, nothing is counted twice."""
    pool = DecodePool()
    pool.join(worker("d0", Role.DECODE), 0)
    pool.reserve("d0", "r1", 5, 300)
    for name in ("r1", "r1", "r2"):
        pool.activate("d0", name, 1.0)
    pool.check()
    assert (pool.active_batch[0], pool.incoming_batch[0], pool.active_context[0]) == (1, 0, 300)


def test_forgetting_what_was_not_expected_to_decode_changes_nothing() -> None:
    """Rows of others stay."""
    timeline = DecodeTimeline()
    timeline.expect("r1", 0.0, 5.0, 100)
    timeline.forget("r2")
    timeline.check()
    assert timeline.at(1.0) == (1, 100.0)


# the replicator


def test_tracked_prefixes_are_bounded() -> None:
    """Whichever was not asked for the longest is forgotten."""
    driven = drive(replace(AT_ONCE, migration=replace(BUDGET, tracked_prefixes=2)))
    for number in range(5):
        driven.store("p0", request(f"r{number}").block_hashes)
        driven.place(request(f"r{number}", tokens=700, own=number))
    assert len(driven.scheduler._migration._heads) == 2


def test_the_loss_of_a_worker_ends_no_copy_between_others() -> None:
    """Three workers, one copy, and the third one dies."""
    driven = hot()
    (copy,) = copies(round_of(driven))
    (third,) = {"p0", "p1", "p2"} - {copy.source.owner, copy.target.owner}
    driven(WorkerLost(third, 1))
    assert [one["target"] for one in driven.scheduler.copies_in_flight()] == [copy.target.owner]


def test_nothing_is_copied_where_nobody_could_take_it() -> None:
    """Everyone who might be a target has the prefix already."""
    driven = hot(MigrationConfig(budget_bytes_per_s=1e9, min_heat=3.0, max_replicas=9))
    for name in ("p1", "p2"):
        driven.store(name, request("r1", tokens=700, shared=10).block_hashes[:10])
    assert copies(round_of(driven)) == []


def test_more_tracked_prefixes_than_allowed_are_noticed() -> None:
    """`check()` holds the bound."""
    driven = hot()
    scheduler: Scheduler = driven.scheduler
    scheduler._migration._config = replace(BUDGET, tracked_prefixes=0)
    with pytest.raises(InvariantError, match="prefixes tracked, 0 allowed"):
        scheduler.check()


def test_a_finish_heard_after_the_loss_of_its_worker_ends_the_request() -> None:
    """All output had been sent before the worker died: nobody is going to ask for a continuation."""
    driven = drive()
    placed = driven.place(request())
    driven.prefilled(placed, 0.1, reused=0)
    (resume,) = [one for one in driven(WorkerLost(placed.decode or "", 1), at=1.0) if isinstance(one, ResumeRequest)]
    assert driven(RequestFinished("r1", resume.attempt, 5, FinishReason.STOP), at=1.1) == []
    assert driven.scheduler.next_deadline() is None
    assert driven.scheduler.overview(2.0)["outcomes"] == {"stop": 1}


def test_a_continuation_that_comes_after_that_is_placed_all_the_same() -> None:
    """The front end had missed some of the output, and had asked before it could know."""
    driven = drive()
    placed = driven.place(request())
    driven(WorkerLost(placed.prefill, 1), RequestFinished("r1", 1, 5, FinishReason.STOP), at=1.0)
    (again,) = placements(driven.settle(RequestResumed(request(attempt=2, emitted_tokens=3)), at=1.1))
    assert again.attempt == 2


def test_a_cancelled_remainder_of_a_lost_attempt_ends_nothing() -> None:
    """What is cancelled on the other worker is the attempt, not the request."""
    driven = drive()
    placed = driven.place(request())
    driven(WorkerLost(placed.prefill, 1), RequestFinished("r1", 1, 5, FinishReason.CANCELLED), at=1.0)
    assert driven.scheduler.next_deadline() is not None
