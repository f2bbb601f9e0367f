"""Rejections judged after the fact, and what looking at the cluster finds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from conductor.core.config import CalibrationConfig, SchedulerConfig
from conductor.core.events import LoadReported
from conductor.core.types import SLO, Priority
from tests.traces.sim_builders import options, profile, row, run
from traces import report
from traces.outcomes import OutcomeStatus, RunResult
from traces.replay import replay_simulated
from traces.sim.prefill import StepLog
from traces.sim.results import collect
from traces.simulator import SimulationOptions
from traces.summary import summarise

SCHEMA = json.loads((Path(report.__file__).parent / "report.schema.json").read_text(encoding="utf-8"))


def strict(ttft_s: float, **changes: Any) -> SimulationOptions:
    """Early rejection by a scheduler that trusts its estimates from the start."""
    config = SchedulerConfig(
        block_tokens=512,
        policy="local_cache_aware",
        admission="early",
        slo=SLO(ttft_s, 0.1),
        calibration=CalibrationConfig(min_observations=0),
    )
    return replace(options(scheduler=config), **changes)


def result(trace: list[Any], chosen: SimulationOptions) -> RunResult:
    return collect("test", run(trace, chosen)[0])


@pytest.mark.parametrize(
    ("from_s", "work_s", "done_s"),
    [(0.0, 0.5, 0.5), (0.0, 1.5, 3.5), (1.5, 0.5, 3.5), (1.5, 1.5, 6.5), (7.0, 2.0, 9.0)],
)
def test_work_is_done_in_the_pauses_between_steps(from_s: float, work_s: float, done_s: float) -> None:
    """Steps from 1 to 3 and from 4 to 6 leave pauses before, between and after."""
    log = StepLog()
    log.add(1.0, 3.0)
    log.add(4.0, 6.0)
    assert done_s == log.done_s(from_s, work_s)


def test_rejection_of_what_an_idle_cluster_cannot_do_in_time_is_right() -> None:
    """100,000 tokens never make one second."""
    trace = [*(row(number * 1.0, 600) for number in range(8)), row(20.0, 100_000)]
    found = result(trace, strict(1.0))
    rejected = [outcome for outcome in found.outcomes if outcome.status is OutcomeStatus.REJECTED]
    assert [outcome.falsely_rejected for outcome in rejected] == [False]
    assert summarise(found)["false_rejections"] == 0


def test_rejection_of_what_idle_workers_could_have_done_is_false() -> None:
    """A scheduler that sheds at a hundredth of the objective refuses for nothing."""
    eager = replace(strict(10.0).scheduler, rejection_bias=dict.fromkeys(Priority, 100.0))
    found = result([row(number * 5.0, 6000) for number in range(8)], options(scheduler=eager))
    verdicts = [outcome.falsely_rejected for outcome in found.outcomes if outcome.status is OutcomeStatus.REJECTED]
    assert verdicts
    assert all(verdicts)


def test_simulated_report_keeps_to_the_schema_and_knows_every_figure() -> None:
    """What `--json` must have is there for a simulation: nothing that the truth knows is null."""
    trace = [row(number * 0.05, 6000, output=20, shared=4) for number in range(40)]
    found: dict[str, Any] = summarise(replay_simulated(trace, replace(strict(0.6), speed=4.0)))
    jsonschema.validate(json.loads(json.dumps(found, allow_nan=False)), SCHEMA)
    unknown = [name for name, value in found.items() if value is None]
    assert unknown == ["wall_s", "read_report"]
    assert found["rejected"]
    assert found["replicas"]["1"] >= 1
    assert found["bytes_moved"]["handover"] > 0


def test_replicas_follow_demand() -> None:
    """Round robin over two workers brings the common blocks to both, the others to one."""
    found = result([row(number * 1.0, 2048, shared=2) for number in range(6)], options())
    assert found.replicas["1"] == 2.0
    assert 1.0 < found.replicas["10"] < 2.0


def test_load_reports_come_at_their_interval_and_change_nothing_where_all_work_is_the_schedulers() -> None:
    """Epoch and worker are named; a report during a prompt says how much of it is left."""
    trace = [row(0.0, 60_000), row(0.0, 60_000), row(0.1, 60_000)]
    quiet, (simulation, calls) = run(trace), run(trace, options(load_reports_s=0.25))
    reports = [(now, event) for now, event, _ in calls if isinstance(event, LoadReported)]
    assert {now for now, _ in reports[:8]} == {0.0, 0.25}
    assert any(event.load.running_prefill_remaining_s > 0 for _, event in reports)
    assert any(event.load.queued_prefill_tokens == 60_000 for _, event in reports)
    finished = [[record.finished_s for record in each.records.values()] for each in (quiet[0], simulation)]
    assert finished[0] == finished[1]


def test_load_of_both_pools_is_sampled_against_the_objectives() -> None:
    """Queued prompts show in the prefill load, sequences that decode in the decode load; both end at rest."""
    cluster = profile(first_token="prefill")
    chosen = options(cluster, scheduler=replace(options().scheduler, slo=SLO(10.0, 0.01)))
    loads = result([row(0.0, 60_000, output=1000), *(row(0.0, 60_000, output=900) for _ in range(3))], chosen).loads
    assert loads[0].prefill_load > 0
    assert max(sample.decode_load for sample in loads) > 0.5
    assert (loads[-1].prefill_load, loads[-1].decode_load) == (0.0, 0.0)


def test_load_report_interval_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"load_reports_s is 0.0; allowed: a number above 0, or None"):
        options(load_reports_s=0.0)
