"""Requests that lost a worker: they go on, or are given up within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conductor.core.commands import Cancel, Reject, ResumeRequest
from conductor.core.config import SchedulerConfig
from conductor.core.events import (
    RequestFailed,
    RequestResumed,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from conductor.core.types import RejectReason, Role
from tests.core.builders import AT_ONCE, Drive, cluster, drive, placements, refused, request, worker


def interrupted(config: SchedulerConfig = AT_ONCE) -> Drive:
    """One request that has lost the only prefill worker."""
    driven = drive(config, cluster(1, 1))
    driven.place(request("r1"))
    assert driven(WorkerLost("p0", 1))[-1] == ResumeRequest("r1", 1)
    return driven


def continuation(attempt: int = 2) -> RequestResumed:
    return RequestResumed(replace(request("r1"), attempt=attempt))


def test_a_continuation_waits_for_a_worker_and_takes_the_first() -> None:
    """The only worker is gone: its request is placed as soon as it comes back."""
    driven = interrupted()
    assert driven(continuation()) == []
    (placed,) = placements(driven(WorkerJoined(worker("p0", Role.PREFILL), 2)))
    assert (placed.request_id, placed.attempt) == ("r1", 2)


def test_a_continuation_that_a_former_conductor_asked_for_waits_for_the_workers() -> None:
    """They join the new one a moment later."""
    driven = drive(AT_ONCE, ())
    assert driven(continuation()) == []
    driven(WorkerJoined(worker("d0", Role.DECODE), 1))
    (placed,) = placements(driven(WorkerJoined(worker("p0", Role.PREFILL), 1)))
    assert (placed.request_id, placed.attempt) == ("r1", 2)


def test_a_continuation_that_nobody_takes_is_given_up() -> None:
    """The wait for a worker is bounded."""
    driven = interrupted()
    driven(continuation())
    due_s = driven.scheduler.next_deadline()
    assert due_s == AT_ONCE.queue.orphan_wait_s
    assert refused(driven(Tick(), at=due_s)) == [RejectReason.NO_PREFILL]


def test_a_continuation_that_does_not_come_is_given_up() -> None:
    """The wait for the front end is bounded."""
    driven = interrupted()
    due_s = driven.scheduler.next_deadline()
    assert due_s == AT_ONCE.resume_timeout_s
    assert refused(driven(Tick(), at=due_s)) == [RejectReason.RETRIES_EXHAUSTED]


@pytest.mark.parametrize("attempt", [1, 3])
def test_a_continuation_of_another_attempt_changes_nothing(attempt: int) -> None:
    """Only the attempt after the one that failed goes on."""
    driven = interrupted()
    assert driven(continuation(attempt)) == []
    assert driven.scheduler.next_deadline() == AT_ONCE.resume_timeout_s


def test_attempts_are_counted() -> None:
    """A request that keeps failing is given up, and what is left of it cancelled."""
    driven = drive(replace(AT_ONCE, max_attempts=1))
    placed = driven.place(request("r1"))
    commands = driven(RequestFailed("r1", 1, placed.prefill, "out of memory"))
    assert [type(command) for command in commands] == [Cancel, Reject]
    assert refused(commands) == [RejectReason.RETRIES_EXHAUSTED]


def test_a_failure_told_by_somebody_else_changes_nothing() -> None:
    """Only a worker that the attempt depends on can fail it."""
    driven = drive(AT_ONCE)
    placed = driven.place(request("r1"))
    other = "p1" if placed.prefill == "p0" else "p0"
    assert driven(RequestFailed("r1", 1, other, "out of memory")) == []
