"""Requests that no worker may take wait within bounds and are told why in the end; workers that cannot belong are refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from conductor.core.commands import Reject
from conductor.core.config import QueueConfig, SchedulerConfig
from conductor.core.events import RequestArrived, RequestFailed, RequestResumed, Tick, WorkerDraining, WorkerJoined
from conductor.core.scheduler import Scheduler
from conductor.core.types import SLO, RejectReason, Role
from tests.core.builders import PROFILE, Drive, cluster, drive, request, worker


@pytest.mark.parametrize("slo", [SLO(), SLO(ttft_s=1.0)])
def test_a_request_that_nobody_comes_to_take_is_refused_and_told_why(slo: SLO) -> None:
    """It waits as long as an orphan does; the refusal names the model that it asked for and those that are served."""
    config = SchedulerConfig(policy="conductor", slo=slo, queue=QueueConfig(orphan_wait_s=7.0))
    driven = drive(config, cluster(1, 1, model="other"))
    assert driven.settle(RequestArrived(request("r1", model="wanted")), at=1.0) == []
    assert driven.scheduler.next_deadline() == 8.0
    assert driven(Tick(), at=7.99) == []
    (refused,) = driven(Tick(), at=8.0)
    assert isinstance(refused, Reject)
    assert refused.rejection.reason is RejectReason.NO_PREFILL
    assert refused.rejection.message == "no prefill worker serves model 'wanted'; served: other"
    assert driven.scheduler.next_deadline() is None


def test_who_waits_in_line_is_given_up_when_the_last_worker_drains() -> None:
    """Its worker was busy; now nobody takes work any more. A worker that comes in time starts the wait anew for the others."""
    driven = drive(SchedulerConfig(policy="conductor", queue=QueueConfig(orphan_wait_s=7.0)), cluster(1, 1))
    driven.settle(*(RequestArrived(request(f"r{number}", tokens=64_000)) for number in (1, 2)), at=1.0)
    driven(WorkerDraining("d0"), at=2.0)
    assert driven.scheduler.next_deadline() is not None
    driven(WorkerJoined(worker("d1", Role.DECODE), 1), at=3.0)
    driven(WorkerDraining("d1"), at=4.0)
    assert driven(Tick(), at=10.99) == []
    (refused,) = driven(Tick(), at=11.0)
    assert isinstance(refused, Reject)
    assert refused.rejection.reason is RejectReason.NO_DECODE
    assert refused.rejection.message == "no decode worker takes requests"


def test_a_refusal_names_the_workers_that_failed_the_request() -> None:
    """The only one of its model is not asked twice."""
    driven = drive(SchedulerConfig(policy="conductor", queue=QueueConfig(orphan_wait_s=7.0)), cluster(1, 1))
    driven.place(request("r1"))
    driven(RequestFailed("r1", 1, "p0", "out of memory"))
    driven(RequestResumed(request("r1", attempt=2)))
    (refused,) = driven(Tick(), at=7.0)
    assert isinstance(refused, Reject)
    assert refused.rejection.message == "no prefill worker is left that has not failed the request: p0"


def test_a_policy_that_chooses_nobody_lets_nobody_wait_for_ever() -> None:
    """Workers are there; who is never chosen is given up all the same."""
    config = SchedulerConfig(queue=QueueConfig(orphan_wait_s=7.0), late_binding=True)
    driven = Drive(Scheduler(config, policy=lambda situation: None))
    driven(*cluster(1, 1))
    assert driven.settle(RequestArrived(request("r1"))) == []
    (refused,) = driven(Tick(), at=7.0)
    assert isinstance(refused, Reject)
    assert "policy" in refused.rejection.message


def test_a_worker_with_blocks_of_another_size_is_refused() -> None:
    """Its reports would speak of other blocks. The error names field, value and what is allowed; nothing has changed."""
    driven = drive(joins=cluster(1, 1))
    odd = worker("p1", Role.PREFILL, profile=replace(PROFILE, block_tokens=16))
    words = "profile.block_tokens of worker 'p1' is 16; it must be 64, as block_tokens is configured"
    with pytest.raises(ValueError, match=re.escape(words)):
        driven(WorkerJoined(odd, 1))
    driven.scheduler.check()
    assert set(driven.scheduler.worker_belief()) == {"p0", "d0"}
