"""Experiments of the papers: what they vary and how they judge."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from conductor.flight_log import recording
from conductor.policies_loader import load_policy
from tests.traces.schemas import check
from tests.traces.sim_builders import row
from traces import commands, sim_commands
from traces.experiment_command import as_json
from traces.experiments import EXPERIMENTS
from traces.experiments.dualpath import more_agents
from traces.experiments.experiment import Findings, Row, Simulations, cut_outputs
from traces.experiments.overload import phase, swing
from traces.outcomes import LoadSample, RunResult
from traces.simulator import simulate

TRACE = [row(number * 0.2, 3000, output=3, first_block=1000 * (number % 5)) for number in range(20)]
APP = typer.Typer()
commands.register(APP)
sim_commands.register(APP, recording, Path("no-profiles"), load_policy)


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_every_variant_runs_and_every_claim_is_judged(name: str) -> None:
    """On a small trace; whether claims hold there does not matter."""
    experiment = EXPERIMENTS[name]
    steps: list[str] = []
    findings = experiment.run(TRACE, steps.append)
    assert len(steps) == experiment.steps()
    assert all(len(found.ours) == len(findings.columns) for found in findings.rows)
    assert any(figure > 0 for found in findings.rows for figure in found.ours)
    assert findings.claims
    assert all(claim.ours for claim in findings.claims)


def test_figures_that_were_not_measured_are_null() -> None:
    """A run in which nothing completed has no mean TTFT, and JSON has no number for that."""
    experiment = EXPERIMENTS["fast25-scheduling"]
    findings = Findings(("mean TTFT, s",), [Row("random", None, (float("nan"),))], [])
    text = json.dumps(as_json(experiment, "trace", 1, findings), allow_nan=False)
    check(text, "experiment")
    assert '"mean TTFT, s": null' in text


def test_agents_begin_more_often_and_keep_their_pauses() -> None:
    """The load of DualPath's experiment changes the beginnings of trajectories alone."""
    turns = [replace(row(10.0 * agent + 3.0 * turn, 600), session=str(agent)) for agent in range(3) for turn in range(2)]
    assert [request.timestamp_s for request in more_agents(2.0, turns)] == [0.0, 3.0, 5.0, 8.0, 10.0, 13.0]


def slower(run: RunResult, factor: float) -> RunResult:
    return replace(run, outcomes=[replace(outcome, ttft_s=outcome.ttft_s * factor) for outcome in run.outcomes])


@pytest.mark.parametrize(("factors", "ordered", "gain"), [((6, 2, 1.2, 1), True, True), ((6, 1, 2, 1.95), False, False)])
def test_scheduling_claims_follow_the_measured_order(factors: tuple[float, ...], ordered: bool, gain: bool) -> None:
    """random > load balancing > local cache-aware > global, the last two at least 5 % apart."""
    experiment = EXPERIMENTS["fast25-scheduling"]
    assert isinstance(experiment, Simulations)
    names = ("random", "least_loaded", "local_cache_aware", "kvcache_centric")
    run = simulate(TRACE, experiment.variants()[0].options)
    runs = {name: slower(run, factor) for name, factor in zip(names, factors, strict=True)}
    assert [claim.holds for claim in experiment.judge(runs)][:2] == [ordered, gain]


def swinging(period: int, decode_sign: float) -> RunResult:
    """Both loads swing around 0.5; decode with or against prefill."""
    run = simulate([row(0.0, 600), row(400.0, 600)], EXPERIMENTS["arxiv-overload"].variants()[0].options)
    waves = [(2.0 * n, 0.2 if n // period % 2 else -0.2) for n in range(200)]
    return replace(run, loads=[LoadSample(at_s, 0.5 + wave, 0.5 + decode_sign * wave) for at_s, wave in waves])


def test_phase_tells_loads_that_swing_against_each_other() -> None:
    """-1 against, +1 together; the swing is relative to the mean load, and a steady load has none."""
    assert phase(swinging(10, -1.0)) == pytest.approx(-1.0)
    assert phase(swinging(10, 1.0)) == pytest.approx(1.0)
    assert 0.3 < swing(swinging(10, 1.0), "decode_load") < 0.5
    assert swing(swinging(10, 0.0), "decode_load") == pytest.approx(0.0, abs=1e-9)


def test_cut_outputs_leave_prompts_alone() -> None:
    assert [(request.input_tokens, request.output_tokens) for request in cut_outputs(TRACE)] == [(3000, 1)] * len(TRACE)


def test_experiment_without_a_trace_generates_its_workload() -> None:
    """`--limit` bounds it, `--json -` leaves nothing else on standard output, claims that fail show in the exit code."""
    result = CliRunner().invoke(APP, ["experiment", "fast25-cache-capacity", "--limit", "300", "--json", "-"])
    found: dict[str, Any] = json.loads(result.stdout)
    check(result.stdout, "experiment")
    assert (found["trace"], found["requests"]) == ("conversation look-alike", 300)
    assert [row["label"] for row in found["rows"]][1] == "3M tokens"
    assert result.exit_code == (0 if all(claim["holds"] for claim in found["claims"]) else 1)


def test_experiment_names_what_it_cannot_use(tmp_path: Path) -> None:
    unknown = CliRunner().invoke(APP, ["experiment", "fig5"])
    missing = CliRunner().invoke(APP, ["experiment", "fast25-scheduling", str(tmp_path / "none")])
    assert (unknown.exit_code, missing.exit_code) == (2, 2)
    assert "experiment is 'fig5'; allowed: fast25-scheduling" in unknown.stderr.replace("\n", " ")
