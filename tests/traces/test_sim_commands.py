"""`conductor simulate` from its flags to its figures."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from conductor.flight_log import recording
from conductor.policies_loader import load_policy
from tests.traces.builders import mooncake_line, write_lines
from tests.traces.schemas import check
from traces import commands, sim_commands

APP = typer.Typer()
commands.register(APP)
sim_commands.register(APP, recording, Path("no-profiles"), load_policy)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty prompts of 2,048 tokens, half a second apart, each twice."""
    lines = [mooncake_line(500 * n, 4, 20, 4 * (n // 2)) for n in range(40)]
    return write_lines(tmp_path / "t.jsonl", *lines)


def simulated(trace: Path, *words: object) -> dict[str, Any]:
    result = CliRunner().invoke(APP, ["simulate", str(trace), "--admission", "none", "--json", "-", *map(str, words)])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_coupled_engines_stand_alone_unless_others_are_asked_for(trace: Path) -> None:
    """`--coupled 2` is an undisaggregated cluster: no hand-over moves a byte."""
    found = simulated(trace, "--coupled", 2, "--policy", "least_loaded")
    settings = found["settings"]
    assert [settings[f"{kind}_workers"] for kind in ("prefill", "decode", "coupled")] == [0, 0, 2]
    assert (found["completed"], found["bytes_moved"]) == (40, {})


def test_prefix_cache_and_chunked_prefill_are_switched_by_flags(trace: Path) -> None:
    """Without the cache nothing is reused; without chunks the longest gaps are no shorter."""
    words = ("--coupled", 1, "--policy", "local_cache_aware", "--speed", 4)
    cached, plain = simulated(trace, *words), simulated(trace, *words, "--no-prefix-cache", "--no-chunked-prefill")
    assert cached["prefill_tokens_avoided"] > 0
    assert plain["prefill_tokens_avoided"] == 0
    assert plain["ttft_s"]["mean"] > cached["ttft_s"]["mean"]


def test_node_loss_costs_no_request(trace: Path) -> None:
    """A prefill node dies twice and a decode node for good; all requests end."""
    words = ("--lose", "prefill-000@3-5", "--lose", "prefill-000@9.5-12", "--lose", "decode-001@7", "--load-reports", 1)
    found = simulated(trace, "--prefill", 2, "--decode", 2, *words)
    assert (found["completed"], found["failed"], found["rejected"]) == (40, {}, {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lose", "prefill-000"), "lose is 'prefill-000'; allowed: WORKER@AT"),
        (("--lose", "prefill-000@9-5"), "back_s is 5.0; allowed: a time after lost_s, 9.0"),
        (("--lose", "node@1"), "outage of 'node'; allowed: one of prefill-000"),
        (("--prefill", "0"), "no worker to prefill"),
        (("--load-reports", "0"), "load_reports_s is 0.0; allowed: a number above 0"),
        (("--slo-ttft", "nan"), "slo.ttft_s is nan; it must be a finite number of at least 0"),
        (("--json", "/no/such/folder/figures.json"), "--json is '/no/such/folder/figures.json'; allowed: a file in a folder"),
        (("--html", "/"), "--html is '/'; allowed: a file in a folder that exists and can be written to"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(trace: Path, words: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(APP, ["simulate", str(trace), *words])
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")


CUSTOM = """
from conductor.core.policies import policy_named

def least(situation):
    return policy_named("least_loaded")(situation)
"""


def test_policy_of_ones_own_runs_by_its_path(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`module:function` names a placement policy for `simulate` and `compare` as it does for `serve`."""
    (tmp_path / "own_policy.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = simulated(trace, "--policy", "own_policy:least")
    assert (found["settings"]["policy"], found["completed"]) == ("own_policy:least", 40)
    words = ["compare", str(trace), "--policies", "own_policy:least", "--out", str(tmp_path / "out"), "--json", "-"]
    result = CliRunner().invoke(APP, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["cells"]["own_policy_least-speed1-seed0"]["completed"] == 40


def test_equal_commands_print_equal_bytes(trace: Path) -> None:
    """One seed, one result, in the form of the schema."""
    words = ["simulate", str(trace), "--policy", "random", "--seed", "7", "--json", "-"]
    first, second = (CliRunner().invoke(APP, words).stdout_bytes for _ in range(2))
    assert first == second
    check(first.decode(), "report")


def test_comparison_keeps_to_its_schema_and_takes_up_what_is_there(trace: Path, tmp_path: Path) -> None:
    """A cell that is on file is not computed again, and the figures are the same to the byte."""
    kept = tmp_path / "out"
    words = ["compare", str(trace), "--policies", "conductor", "--out", str(kept), "--json", "-"]
    first = CliRunner().invoke(APP, words)
    check(first.stdout, "comparison")
    times = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    second = CliRunner().invoke(APP, words)
    assert second.stdout_bytes == first.stdout_bytes
    assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == times


@pytest.mark.parametrize("option", ["--policies", "--speeds", "--seeds"])
def test_comparison_of_nothing_is_one_line_and_exit_code_2(trace: Path, option: str) -> None:
    result = CliRunner().invoke(APP, ["compare", str(trace), option, ","])
    assert (result.exit_code, f"{option[2:]} is ','; allowed: at least one value" in result.stderr) == (2, True)


def test_cluster_profile_that_is_no_yaml_is_one_line(trace: Path) -> None:
    """A trace where the profile belongs."""
    result = CliRunner().invoke(APP, ["simulate", str(trace), "--cluster", str(trace)])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert f"cluster profile {trace} is not YAML: " in result.stderr


@pytest.mark.parametrize("command", [["simulate", "--policy"], ["compare", "--policies"]])
def test_unknown_policy_is_one_line_and_exit_code_2(trace: Path, command: list[str]) -> None:
    result = CliRunner().invoke(APP, [command[0], str(trace), command[1], "best"])
    assert result.exit_code == 2
    assert "policy is 'best'; allowed: conductor" in result.stderr.replace("\n", " ")
