"""The trace commands as a user meets them: output, exit codes, files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from typer.testing import CliRunner, Result

from tests.traces.builders import mooncake_line, write_lines
from tests.traces.scripted_server import Script, scripted_app, serving
from traces import report
from traces.commands import register
from traces.formats import open_trace

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((Path(report.__file__).parent / "report.schema.json").read_text(encoding="utf-8"))
MAIN = "import typer; from traces.commands import register; app = typer.Typer(); register(app); app()"


def conductor(*words: object) -> Result:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, [str(word) for word in words])


def process(*words: object) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MAIN, *(str(word) for word in words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_lines(
        tmp_path / "trace.jsonl", *(mooncake_line(100 * n, blocks=2 + n % 2, output=60, first_id=n % 3) for n in range(6))
    )


def test_replay_prints_a_table_and_writes_json_and_html(trace: Path, tmp_path: Path) -> None:
    """The JSON keeps to the schema; hits, estimate error and capacity are in the table."""
    with serving(scripted_app(Script())) as url:
        result = conductor(
            "replay",
            trace,
            "--url",
            url,
            "--scale",
            0.05,
            "--speed",
            5,
            "--json",
            tmp_path / "r.json",
            "--html",
            tmp_path / "r.html",
        )
    assert result.exit_code == 0, result.output
    for label in ("TTFT", "TBT", "token hit ratio", "rejected", "effective request capacity", "estimate error, median"):
        assert label in result.stdout
    found = json.loads((tmp_path / "r.json").read_text())
    jsonschema.validate(found, SCHEMA)
    assert (found["requests"], found["completed"]) == (6, 6)
    assert "<svg" in (tmp_path / "r.html").read_text()


def test_json_on_standard_output_stands_there_alone(trace: Path) -> None:
    with serving(scripted_app(Script())) as url:
        result = conductor("replay", trace, "--url", url + "/v1", "--speed", 50, "--limit", 2, "--json", "-")
    assert json.loads(result.stdout)["requests"] == 2


def test_replay_with_failed_requests_exits_with_1_and_rejections_with_0(trace: Path) -> None:
    with serving(scripted_app(Script(reject_lengths=frozenset({52})))) as url:
        rejected = conductor("replay", trace, "--url", url, "--scale", 0.05, "--speed", 50)
    with serving(scripted_app(Script(refuse_lengths=frozenset({52})))) as url:
        failed = conductor("replay", trace, "--url", url, "--scale", 0.05, "--speed", 50)
    assert (rejected.exit_code, failed.exit_code) == (0, 1)
    assert "3 (ttft_slo 3)" in rejected.stdout
    assert "3 (http_400 3)" in failed.stdout


def test_interrupt_gives_a_partial_report(trace: Path, tmp_path: Path) -> None:
    """The first Ctrl-C cancels what is in flight; everything taken from the trace is in the report."""
    script = Script(hang_lengths=frozenset({1024, 1536}))
    with serving(scripted_app(script)) as url:
        running = process("replay", trace, "--url", url, "--json", tmp_path / "r.json")
        while len(script.bodies) < 6 and running.poll() is None:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["interrupted"], found["requests"], found["unfinished"]) == (True, 6, 6)
    assert "unfinished" in out


def test_skipped_rows_are_told_and_land_in_the_report(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", mooncake_line(0), "{", mooncake_line(10))
    with serving(scripted_app(Script())) as url:
        result = conductor("replay", path, "--url", url, "--json", "-")
    assert "skipped 1 rows: not_json 1" in result.stderr
    assert json.loads(result.stdout)["read_report"]["skipped"] == {"not_json": 1}


BAD_USE: list[tuple[tuple[object, ...], int, str]] = [
    (("--url", "http://127.0.0.1:1"), 3, "does not answer"),
    (("--speed", 0), 2, "speed is 0.0; allowed: a number above 0"),
    (("--slo-tbt", "nan"), 2, "slo.tbt_s is nan; allowed: a number above 0"),
    (("--token-range", "5"), 2, "--token-range is '5'; allowed: LOW:HIGH"),
    (("--token-range", "9:5"), 2, "token range is 9:5; allowed"),
    (("--format", "csv"), 2, "format is 'csv'; allowed: mooncake"),
]


@pytest.mark.parametrize(("words", "code", "message"), BAD_USE)
def test_bad_use_of_replay_is_one_line_and_an_exit_code(
    trace: Path, words: tuple[object, ...], code: int, message: str
) -> None:
    result = conductor("replay", trace, *words)
    assert code == result.exit_code
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_strict_replay_sends_nothing_of_a_faulty_trace(tmp_path: Path) -> None:
    script = Script()
    with serving(scripted_app(script)) as url:
        result = conductor("replay", write_lines(tmp_path / "t", mooncake_line(), "{"), "--url", url, "--strict")
    assert result.exit_code == 2
    assert script.bodies == []


def test_stats_show_hit_ratios_by_capacity_and_as_json(trace: Path, tmp_path: Path) -> None:
    result = conductor("trace", "stats", trace, "--capacity", "1,4", "--json", tmp_path / "s.json")
    assert result.exit_code == 0, result.output
    for text in ("6 requests", "Infinite cache", "lru", "length_aware"):
        assert text in result.stdout
    found: dict[str, Any] = json.loads((tmp_path / "s.json").read_text())
    assert len(found["reuse"]["capacities"]) == 6
    assert found["read_report"]["requests"] == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--capacity", "1,0"), "--capacity is '1,0'"), (("--block-tokens", "64"), "allowed: 16 ids for this length")],
)
def test_bad_use_of_stats_is_one_line(trace: Path, words: tuple[str, ...], message: str) -> None:
    result = conductor("trace", "stats", trace, *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_generated_trace_is_converted_and_read_back(tmp_path: Path) -> None:
    generated, converted = tmp_path / "g.jsonl.zst", tmp_path / "c.jsonl.gz"
    assert conductor("trace", "generate", "toolagent", generated, "--requests", 30, "--seed", 2).exit_code == 0
    assert conductor("trace", "convert", generated, converted, "--to-block-tokens", 1024, "--limit", 20).exit_code == 0
    assert len(list(open_trace(converted, block_tokens=1024, strict=True))) == 20


def test_bad_names_in_generate_and_convert_are_one_line(trace: Path, tmp_path: Path) -> None:
    unknown = conductor("trace", "generate", "chat", tmp_path / "g")
    nowhere = conductor("trace", "convert", trace, tmp_path / "none" / "c")
    assert (unknown.exit_code, nowhere.exit_code) == (2, 2)
    assert "workload is 'chat'" in unknown.stderr
    assert "No such file or directory" in nowhere.stderr


def test_fetch_tells_size_and_checksum_or_why_not(tmp_path: Path) -> None:
    with serving(scripted_app(Script())) as url:
        fetched = conductor("trace", "fetch", url + "/v1/models", tmp_path / "m")
        missing = conductor("trace", "fetch", url + "/none", tmp_path / "n")
    assert (fetched.exit_code, missing.exit_code) == (0, 3)
    assert "sha256" in fetched.stdout
    assert "answers 404" in missing.stderr
    nowhere = conductor("trace", "fetch", "nowhere", tmp_path / "o")
    assert (nowhere.exit_code, "address is 'nowhere'; allowed: an http or https address" in nowhere.stderr) == (2, True)


def test_commands_start_without_torch_ray_and_matplotlib() -> None:
    code = "import sys, traces.commands; print([m for m in ('torch', 'ray', 'matplotlib') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"
