"""Faults of admission, cancellation, fail-over and memory that users of other schedulers reported, each shown not to be ours.

Each docstring names the threads; `conductor/DESIGN.md` lists them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from conductor.core.commands import Cancel, Command, Reject, ResumeRequest, StartPrefill
from conductor.core.config import CalibrationConfig, SchedulerConfig
from conductor.core.events import (
    BlocksRemoved,
    BlocksStored,
    HandoverFinished,
    PrefillFinished,
    PrefillStarted,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestResumed,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from conductor.core.prefix_index import PrefixIndex
from conductor.core.scheduler import Scheduler
from conductor.core.types import SLO, FinishReason, Holder, Placement, Rejection, RejectReason, Role, Stamp, Tier
from tests.core.builders import PROFILE, Drive, blocks, cluster, drive, placements, request, worker

OURS = SchedulerConfig(policy="conductor", late_binding=False)
STRICT = replace(OURS, slo=SLO(ttft_s=0.2), calibration=CalibrationConfig(min_observations=2))


def rejections(commands: Sequence[Command]) -> list[Rejection]:
    return [command.rejection for command in commands if isinstance(command, Reject)]


def calibrated(config: SchedulerConfig = STRICT) -> Drive:
    """Both prefill workers have been seen to take as long as predicted."""
    driven = drive(config)
    for number in range(100, 104):
        placed = driven.place(request(f"r{number}"))
        driven.prefilled(placed, PROFILE.prefill_s(640, 0))
        driven.decoded(placed, 5, 0.001)
    return driven


def held(driven: Drive) -> list[str]:
    """What is still booked anywhere (I9)."""
    view = driven.scheduler._view
    prefill = ("pending_s", "jobs", "active_tokens", "flows_in", "flows_out")
    decode = ("reserved_blocks", "incoming_batch", "active_batch", "active_context", "flows_in", "flows_out")
    return [name for name in prefill if getattr(view.prefill, name).any()] + [
        name for name in decode if getattr(view.decode, name).any()
    ]


def decoding(placed: Placement) -> str:
    """The decode worker of a placement that has one."""
    assert placed.decode is not None
    return placed.decode


# admission


def test_a_refusal_says_why_and_what_would_have_been() -> None:
    """dynamo #8189, #11562: reason, best candidate, prediction with interval, objective, shortfall, retry."""
    driven = calibrated()
    (refused,) = rejections(driven.arrive(request("r1", tokens=6400)))
    assert refused.predicted_s is not None
    assert (refused.reason, refused.objective_s) == (RejectReason.TTFT_SLO, 0.2)
    assert refused.best_worker in ("p0", "p1")
    assert refused.predicted_s == pytest.approx(0.65)
    assert refused.shortfall_s == pytest.approx(0.45)
    assert refused.predicted_low_s is not None
    assert refused.predicted_high_s is not None
    assert refused.predicted_low_s <= refused.predicted_s <= refused.predicted_high_s


def test_retry_after_grows_with_the_shortfall() -> None:
    """dynamo #9755: retries of what was shed cascade, unless the answer says how long to stay away."""
    waits = []
    for queued in (0, 10):
        driven = calibrated()
        driven.arrive(*(request(f"r{number}", tokens=1280, slo=SLO(ttft_s=60.0)) for number in range(1, 1 + queued)))
        (refused,) = rejections(driven.arrive(request("r99", tokens=6400)))
        waits.append(refused.retry_after_s)
    assert waits[0] < waits[1]


def test_work_already_paid_for_is_not_shed() -> None:
    """dynamo #9755: the continuation of an interrupted request is placed, whatever is predicted for it."""
    driven = calibrated()
    placed = driven.place(request("r1", tokens=6400, slo=SLO(ttft_s=60.0)))
    driven(RequestFailed("r1", 1, placed.prefill, "out of memory"))
    resumed = replace(request("r1", tokens=6400), attempt=2)
    assert placements(driven(RequestResumed(resumed)))[0].attempt == 2


def test_a_cold_start_teaches_nothing() -> None:
    """dynamo #12430: samples of a cold start poisoned the regression."""
    driven = drive(OURS)
    for number in range(1, 9):
        placed = driven.place(request(f"r{number}"))
        driven(PrefillFinished(placed.request_id, 1, placed.prefill, 0, 30.0, warmup=True))
        driven.decoded(placed, 2, 0.001)
    assert driven.place(request("r99")).ttft.prefill_s == PROFILE.prefill_s(640, 0)


def test_what_was_predicted_is_held_against_what_happened() -> None:
    """llm-d-router #2380: predictions were not kept beside the actual times, and no error was known."""
    driven = drive(OURS)
    for number in range(1, 9):
        placed = driven.place(request(f"r{number}"))
        driven.prefilled(placed, 2 * PROFILE.prefill_s(640, 0))
        driven.decoded(placed, 2, 0.001)
    estimate = driven.place(request("r99")).ttft
    assert estimate.prefill_s == pytest.approx(2 * PROFILE.prefill_s(640, 0), rel=0.05)


# cancellation and faults


@pytest.mark.parametrize("steps", range(4))
def test_a_client_that_leaves_stops_the_work_and_frees_everything(steps: int) -> None:
    """dynamo #13691, #13855: prefill went on after a disconnect, and its blocks leaked (I9)."""
    driven = drive(OURS)
    driven.store("p1", blocks(100, shared=100))
    placed = driven.place(request("r1", tokens=6500, shared=100))
    progress = (
        PrefillStarted("r1", 1, placed.prefill),
        PrefillFinished("r1", 1, placed.prefill, placed.reuse.reused_tokens, 0.05),
        HandoverFinished("r1", 1, 1, 0.01),
    )
    driven(*progress[:steps])
    workers = (placed.prefill, decoding(placed)) if steps < 3 else (decoding(placed),)
    assert driven(RequestCancelled("r1")) == [Cancel("r1", 1, workers)]
    assert held(driven) == []
    assert driven(*progress, RequestFinished("r1", 1, 1, FinishReason.CANCELLED)) == [], "what comes late changes nothing"
    assert held(driven) == []


def test_a_client_that_leaves_the_line_is_never_sent_out() -> None:
    """production-stack #634: the cancellation of a queued request did not propagate."""
    driven = drive(SchedulerConfig(policy="conductor"))
    driven(*(RequestArrived(request(f"r{number}")) for number in range(1, 4)))
    answer = driven(RequestCancelled("r2")) + driven.settle(at=1.0)
    assert [one.request_id for one in placements(answer)] == ["r1", "r3"]
    assert not [command for command in answer if isinstance(command, Cancel)], "no worker has heard of it"


def test_counters_return_to_zero_after_a_thousand_requests() -> None:
    """production-stack #687, #707: counters leaked with every request that did not end well."""
    driven = drive(replace(OURS, max_attempts=1))
    for number in range(1000):
        placed = placements(driven.scheduler.handle(RequestArrived(request(f"r{number}")), driven.now))[0]
        ends = (
            RequestCancelled(placed.request_id),
            RequestFinished(placed.request_id, 1, 3, FinishReason.STOP),
            RequestFinished(placed.request_id, 1, 0, FinishReason.FAILED),
            RequestFailed(placed.request_id, 1, placed.prefill, "out of memory"),
        )
        driven.scheduler.handle(ends[number % 4], driven.now)
    driven.scheduler.check()
    assert held(driven) == []
    assert len(driven.scheduler._requests) == 0


def test_a_failed_handover_does_not_leave_a_request_stuck() -> None:
    """vllm #35943: decode waited for ever for a transfer that had failed."""
    driven = drive(OURS)
    placed = driven.place(request("r1"))
    driven.prefilled(placed, 0.07)
    answer = driven(RequestFailed("r1", 1, decoding(placed), "transfer failed"))
    assert answer == [Cancel("r1", 1, (placed.prefill,)), ResumeRequest("r1", 1)]
    assert held(driven) == []
    again = placements(driven(RequestResumed(replace(request("r1"), attempt=2))))
    assert again[0].decode != placed.decode, "not where it has just failed"


def test_a_dead_prefill_worker_does_not_touch_what_decodes() -> None:
    """sglang #12779: a dead prefill worker made the decode workers unhealthy."""
    driven = drive(OURS)
    placed = driven.place(request("r1"))
    driven.prefilled(placed, 0.07)
    driven(HandoverFinished("r1", 1, 1, 0.01))
    assert driven(WorkerLost(placed.prefill, 1)) == []
    assert placements(driven.arrive(request("r2"))), "and others go on being placed"


def test_a_request_of_a_dead_worker_goes_on_elsewhere_at_once() -> None:
    """llm-d-router #2345, nvcf #1533: no fail-over; nine times as long a window as the detection needs."""
    driven = drive(OURS)
    placed = driven.place(request("r1"))
    answer = driven(WorkerLost(placed.prefill, 1))
    assert answer == [Cancel("r1", 1, (decoding(placed),)), ResumeRequest("r1", 1)]
    again = placements(driven(RequestResumed(replace(request("r1"), attempt=2))))
    assert [(one.attempt, one.prefill != placed.prefill) for one in again] == [(2, True)]


def test_absent_blocks_are_not_counted_as_reused_after_their_source_died() -> None:
    """aws-do-eks #84: decode used KV that was not there, and answered 200."""
    driven = drive(OURS, cluster(2, 2))
    driven.store("p1", blocks(100, shared=100))
    driven(WorkerLost("p1", 1), WorkerJoined(worker("p1", Role.PREFILL), 2))
    assert driven.place(request("r1", tokens=6500, shared=100)).reuse.reused_tokens == 0


def test_one_dead_backend_hangs_nobody() -> None:
    """production-stack #749: one dead worker, the only one, hung every request."""
    driven = drive(OURS, cluster(1, 1))
    driven(WorkerLost("p0", 1))
    assert [one.reason for one in rejections(driven.arrive(request("r1")))] == [RejectReason.NO_PREFILL]


def test_a_draining_worker_gets_nothing_new() -> None:
    """llm-d-router #2345: planned departures need no fail-over."""
    driven = drive(OURS)
    driven(WorkerDraining("p0"), WorkerDraining("d0"))
    placed = placements(driven.arrive(*(request(f"r{number}") for number in range(10))))
    assert {("p1", "d1")} == {(one.prefill, one.decode) for one in placed}


# accounting and memory


@pytest.mark.parametrize(("tokens", "reused"), [(640, 576), (641, 640), (639, 576), (64, 0), (1, 0)])
def test_reuse_counts_whole_blocks_once_and_leaves_a_token_to_compute(tokens: int, reused: int) -> None:
    """vllm #43370, #47136: cached tokens were always the prompt less one, or counted twice."""
    driven = drive(OURS)
    driven.store("p0", blocks(10))
    assert driven.place(request("r1", tokens=tokens, own=-9)).reuse == replace(
        driven.place(request("r1b", tokens=1)).reuse, local_tokens=reused
    )


def test_the_index_gives_back_what_is_evicted() -> None:
    """dynamo #10774, #11678: the radix tree was never freed and grew by 20 GB an hour."""
    index = PrefixIndex()
    driven = Drive(Scheduler(OURS, index=index))
    driven(*cluster(1, 1))
    handle, seq, most = driven.scheduler.handle, 0, 0
    for number in range(2000):
        hashes = blocks(50, name=number + 10)
        handle(BlocksStored(Stamp("p0", 1, seq + 1), Tier.DEVICE, None, hashes), 0.0)
        handle(BlocksRemoved(Stamp("p0", 1, seq + 2), Tier.DEVICE, hashes[::-1]), 0.0)
        seq, most = seq + 2, max(most, index.num_blocks)
    assert (index.num_blocks, index.num_claims(Holder("p0", Tier.DEVICE)), most) == (0, 0, 0)


def test_requests_that_have_ended_leave_no_expectation_behind() -> None:
    """dynamo #10774: prefixes of cancelled requests stayed in the tree."""
    index = PrefixIndex()
    driven = Drive(Scheduler(OURS, index=index))
    driven(*cluster(2, 2))
    for number in range(1, 200):
        one = request(f"r{number}")
        assert isinstance(driven.arrive(one)[0], StartPrefill)
        driven(RequestCancelled(one.id))
        assert not index.match(one.block_hashes).depths.any()


def test_a_coupled_engine_decodes_what_it_prefills() -> None:
    """llm-d-router #2315: prefill and decode picked apart from each other moved KV for nothing."""
    joins = [WorkerJoined(worker("c0", Role.COUPLED), 1), *cluster(0, 1)]
    placed: Placement = drive(OURS, joins).place(request())
    assert (placed.prefill, placed.decode) == ("c0", "c0")
