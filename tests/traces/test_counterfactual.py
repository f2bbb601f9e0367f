"""A flight log's arrivals under another policy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conductor.core.config import SchedulerConfig
from conductor.core.policies import policy_named
from conductor.core.scheduler import Scheduler
from conductor.flight_log import read, recording, verify
from traces.clusters.profile import load_profile
from traces.counterfactual import Flight, compare, read_flight, totals
from traces.generate import generate
from traces.simulator import SimulationOptions, simulate

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The flight log of a simulated run of 80 requests under `conductor`."""
    path = tmp_path_factory.mktemp("log") / "run.flight.jsonl"
    config = SchedulerConfig(block_tokens=512, admission="none")
    options = SimulationOptions(load_profile("dynamo-mocker"), 2, 2, scheduler=config, speed=4.0)
    with recording(path, config) as record:
        simulate(generate("conversation", requests=80, seed=3), options, observer=record)
    return path


def flight_of(log: Path) -> tuple[SchedulerConfig, Flight]:
    header, records = read(log, SchedulerConfig)
    return header.scheduler, read_flight(records)


def test_a_simulated_run_verifies(log: Path) -> None:
    """A fresh scheduler answers the log's events with the identical commands."""
    outcome = verify(log, SchedulerConfig, Scheduler)
    assert outcome.difference is None
    assert outcome.records > 80


def test_the_policy_in_force_repeats_what_was_recorded(log: Path) -> None:
    """On the same ground truth, the arrivals come out as the log has them."""
    config, flight = flight_of(log)
    differences = compare(flight, config, config, policy_named, load_profile("dynamo-mocker"))
    for difference in differences:
        assert difference.before == difference.after
        assert difference.before.reused_tokens == difference.recorded.reused_tokens
        assert difference.before.ttft_s == pytest.approx(difference.recorded.ttft_s)


def test_another_policy_changes_totals_and_requests(log: Path) -> None:
    """Round robin reuses less than the policy in force; each request carries all three sides."""
    config, flight = flight_of(log)
    other = SchedulerConfig(block_tokens=512, admission="none", policy="round_robin")
    differences = compare(flight, config, other, policy_named)
    assert len(differences) == 80
    before, after = totals(differences, "before"), totals(differences, "after")
    assert before["requests"] == after["requests"] == 80
    assert int(after["reused_tokens"] or 0) < int(before["reused_tokens"] or 0)


def test_a_log_without_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="0 requests"):
        read_flight([])


def conductor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conductor", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_prints_json_and_names_bad_policies(log: Path) -> None:
    done = conductor("counterfactual", str(log), "--policy", "least_loaded", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["totals"]["after"]["requests"] == 80
    refused = conductor("counterfactual", str(log), "--policy", "fastest")
    assert refused.returncode == 2
    assert "policy is 'fastest'; allowed: conductor" in refused.stderr


def test_a_decision_is_explained_from_the_log(log: Path) -> None:
    """Candidates with their terms, the choice, and what came of it."""
    done = conductor("explain", "0000007", "--log", str(log), "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert {row["worker"] for row in record["candidates"]} == {"prefill-000", "prefill-001"}
    assert record["actual"]["ttft_s"] > 0
    missing = conductor("explain", "nothing", "--log", str(log))
    assert missing.returncode == 2
    assert "no decision with id 'nothing'" in missing.stderr
