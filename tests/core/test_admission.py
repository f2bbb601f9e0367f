"""When a request is refused, why, and what the refusal tells; and when it is not, because nobody can know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conductor.core.commands import Cancel, Command, Reject, StartDecode, StartPrefill
from conductor.core.config import ADMISSIONS, CalibrationConfig, SchedulerConfig
from conductor.core.events import HandoverFinished, RequestArrived
from conductor.core.types import SLO, Priority, Rejection, RejectReason, Tier
from tests.core.builders import Drive, cluster, drive, request

STRICT = SLO(ttft_s=0.02)  # a prompt of 640 tokens takes 0.074 s
EVIDENCE = 6


def tuned(admission: str, policy: str = "local_cache_aware", **changes: Any) -> SchedulerConfig:
    return SchedulerConfig(policy=policy, admission=admission, calibration=CalibrationConfig(learning_rate=0.5), **changes)


def calibrated(config: SchedulerConfig, factor: float = 1.0, step_factor: float = 1.0) -> Drive:
    """A cluster of 1 + 1 workers after some requests, which took `factor` times what the profile says."""
    driven = drive(config, cluster(prefill=1, decode=1))
    for number in range(EVIDENCE):
        name = f"r{900 + number}"
        (start,) = (c for c in driven.settle(arrived(name)) if isinstance(c, StartPrefill))
        placed = start.placement
        driven.prefilled(placed, 0.074 * factor)
        step_s = 0.01 + 0.001 + 640e-7
        driven.decoded(placed, output_tokens=11, step_s=step_s * step_factor)
    return driven


def arrived(name: str, **changes: Any) -> RequestArrived:
    return RequestArrived(request(name, **changes))


def refusal(commands: list[Command]) -> Rejection:
    (rejected,) = (command for command in commands if isinstance(command, Reject))
    return rejected.rejection


@pytest.mark.parametrize("admission", ["on_prefill_done", "early", "predictive"])
def test_a_ttft_that_cannot_be_met_is_refused_with_every_number(admission: str) -> None:
    """The refusal names worker, prediction with interval, objective and shortfall."""
    rejection = refusal(calibrated(tuned(admission)).settle(arrived("r1", slo=STRICT)))
    assert (rejection.reason, rejection.best_worker, rejection.objective_s) == (RejectReason.TTFT_SLO, "p0", 0.02)
    assert rejection.predicted_s == pytest.approx(0.074)
    assert rejection.shortfall_s == pytest.approx(0.054)
    assert rejection.predicted_low_s is not None
    assert rejection.predicted_high_s is not None
    assert rejection.predicted_low_s <= 0.0741
    assert rejection.predicted_high_s >= 0.0739
    assert rejection.retry_after_s == 0.1


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_an_uncalibrated_model_rejects_nothing(admission: str) -> None:
    """I12: nothing has been observed yet, so nobody knows that the objective cannot be met."""
    driven = drive(tuned(admission), cluster(prefill=1, decode=1))
    assert driven.place(request(slo=SLO(ttft_s=1e-6, tbt_s=1e-6))).prefill == "p0"


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_model_that_is_ten_times_wrong_rejects_nothing(admission: str, factor: float) -> None:
    """I12: after the first observations disagree with the profile, its predictions refuse nobody."""
    config = SchedulerConfig(policy="local_cache_aware", admission=admission)
    driven = drive(config, cluster(prefill=1, decode=1))
    for number in range(4):
        placed = driven.place(request(f"r{900 + number}"))
        driven.prefilled(placed, 0.074 * factor)
    assert driven.place(request(slo=SLO(ttft_s=1e-6))).prefill == "p0"


def test_no_admission_refuses_no_prediction() -> None:
    assert calibrated(tuned("none")).place(request("r1", slo=SLO(1e-6, 1e-6))).prefill == "p0"


def test_a_step_that_cannot_be_met_is_refused_on_arrival() -> None:
    """With its interval, and the worker that came closest."""
    rejection = refusal(calibrated(tuned("early")).settle(arrived("r1", slo=SLO(tbt_s=0.005))))
    assert (rejection.reason, rejection.best_worker) == (RejectReason.TBT_SLO, "d0")
    assert rejection.predicted_s == pytest.approx(0.011064, rel=0.01)
    assert rejection.predicted_low_s is not None


def test_decode_steps_are_learned_from_finished_requests() -> None:
    """Steps that take twice what the profile says are predicted so, once seen."""
    driven = calibrated(tuned("early"), step_factor=2.0)
    assert driven.place(request("r1")).tbt_s == pytest.approx(2 * 0.011064, rel=0.05)


def test_on_prefill_done_wastes_the_prefill_of_what_it_refuses() -> None:
    """The decode check comes when the prompt is computed: the worker is told to drop it."""
    driven = calibrated(tuned("on_prefill_done"))
    placed = driven.place(request("r1", slo=SLO(tbt_s=0.005)))
    assert placed.decode is None
    commands = driven.prefilled(placed, 0.074)
    assert commands[0] == Cancel("r1", 1, ("p0",))
    assert refusal(commands).reason is RejectReason.TBT_SLO
    record = driven.scheduler.decision_record("r1")
    assert record is not None
    assert record["actual"]["outcome"] == "rejected_late"


def test_on_prefill_done_goes_on_where_decode_has_room() -> None:
    driven = calibrated(tuned("on_prefill_done"))
    placed = driven.place(request("r1", slo=SLO(tbt_s=1.0)))
    assert StartDecode("r1", 1, "d0") in driven.prefilled(placed, 0.074)


def test_early_refuses_when_the_prefill_pool_is_overloaded() -> None:
    """The chosen worker would do, but on average requests wait longer than the objective."""
    driven = drive(tuned("early", load_threshold=0.4), cluster(prefill=1, decode=1))
    for number in range(EVIDENCE):
        placed = driven.place(request(f"r{900 + number}"))
        driven.prefilled(placed, 0.074)
        driven.decoded(placed, 11, 0.011)
    driven.place(request("r1"))
    rejection = refusal(driven.settle(arrived("r2", slo=SLO(ttft_s=0.15))))
    assert rejection.reason is RejectReason.OVERLOAD
    assert rejection.shortfall_s == pytest.approx(0.014)


def test_predictive_counts_those_who_will_decode_by_then() -> None:
    """A request that still prefills is part of the load at the moment this one would be done."""
    objective = SLO(tbt_s=0.0118)  # one sequence takes 0.01106 s a step, two take 0.01213 s
    alone = calibrated(tuned("predictive"))
    assert alone.place(request("r1", slo=objective)).prefill == "p0"
    rejection = refusal(alone.settle(arrived("r2", slo=objective)))
    assert rejection.reason is RejectReason.OVERLOAD


def test_predictive_leaves_out_those_who_will_be_done() -> None:
    """Whoever decodes now, but is expected to have ended when this prefill ends, is no load."""
    driven = calibrated(tuned("predictive"))
    placed = driven.place(request("r1", max_output_tokens=3))
    driven.prefilled(placed, 0.074)
    driven(HandoverFinished("r1", 1, 1, 0.001))
    assert driven.place(request("r2", slo=SLO(tbt_s=0.0118))).prefill == "p0"


def test_a_high_class_is_given_the_benefit_of_the_doubt() -> None:
    """The same prediction refuses a low class and passes a high one."""
    driven = calibrated(tuned("early"))
    tight = SLO(ttft_s=0.074 * 0.9)
    high = driven.settle(arrived("r1", slo=tight, priority=Priority.HIGH))
    assert isinstance(high[0], StartPrefill)
    driven.prefilled(high[0].placement, 0.074)
    assert refusal(driven.settle(arrived("r2", slo=tight, priority=Priority.LOW))).reason is RejectReason.TTFT_SLO


def test_a_prompt_that_fits_nowhere_is_refused_for_good() -> None:
    """Whatever the admission rule: waiting does not make a worker larger."""
    joins = cluster(capacity_blocks={Tier.DEVICE: 4})
    assert refusal(drive(tuned("none"), joins).settle(arrived("r1"))).reason is RejectReason.TOO_LONG


def test_a_hopeless_request_is_refused_before_it_waits_in_line() -> None:
    """With late binding the answer comes on arrival, not when its turn would be."""
    driven = calibrated(tuned("early", policy="conductor"))
    driven.place(request("r1"))
    assert refusal(driven.arrive(request("r2", slo=STRICT))).reason is RejectReason.TTFT_SLO


def test_a_continuation_is_never_refused_by_prediction() -> None:
    """Its client has seen output already."""
    driven = calibrated(tuned("early"))
    assert driven.place(request("r1", slo=STRICT, attempt=2)).attempt == 2


def test_a_full_line_says_when_to_come_back() -> None:
    config = tuned("early", policy="conductor")
    driven = drive(replace(config, queue=replace(config.queue, max_requests=1)), cluster(prefill=1, decode=1))
    driven.place(request("r1"))
    driven.arrive(request("r2"))
    rejection = refusal(driven.arrive(request("r3")))
    assert (rejection.reason, 0.1 <= rejection.retry_after_s <= 60.0) == (RejectReason.QUEUE_FULL, True)


def test_calibration_ends_when_nothing_is_observed() -> None:
    """Old evidence refuses nobody."""
    driven = calibrated(tuned("early"))
    late_s = driven.now + 1000.0
    commands = driven.settle(arrived("r1", slo=STRICT), at=late_s)
    assert [StartPrefill] == [type(command) for command in commands]


def test_early_counts_of_the_central_line_what_comes_first_alone() -> None:
    """Long prompts wait. A short one passes them, so they are no load for it; another long one would wait for all of them."""
    config = SchedulerConfig(policy="conductor", admission="early")
    driven = drive(config, cluster(prefill=1, decode=1))
    for number in range(EVIDENCE):
        driven.prefilled(driven.place(request(f"r{900 + number}")), 0.074)
    driven.settle(*(arrived(f"r{number}", tokens=64_000) for number in range(10, 14)))
    slo = SLO(ttft_s=15.0)
    assert driven(arrived("r20", tokens=640, slo=slo)) == []
    refused = refusal(driven(arrived("r21", tokens=64_000, slo=slo)))
    assert refused.reason is RejectReason.OVERLOAD
    assert refused.predicted_s == pytest.approx(4 * 6.41 + 0.074, rel=0.01)
