"""The `conductor` command from outside: what it prints, where, and with which exit code."""

from __future__ import annotations

import hashlib
import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conductor import usage
from conductor.cli import app
from conductor.config import all_keys
from conductor.core.config import SchedulerConfig
from conductor.core.events import RequestArrived, Tick
from conductor.core.scheduler import Scheduler
from conductor.core.types import Request
from conductor.flight_log import FlightLogWriter
from tests.models.builders import write_tiny_folder

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def conductor(*arguments: str, environment: dict[str, str] | None = None) -> Done:
    """Run the command in this process."""
    result = CliRunner().invoke(app, arguments, env=environment)
    return Done(result.exit_code, result.stdout, result.stderr)


def conductor_process(*arguments: str) -> Done:
    """Run the command as a shell does."""
    command = [sys.executable, "-m", "conductor", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def one_line(text: str) -> str:
    (line,) = text.strip().splitlines()
    return line


def test_convert_writes_a_model_and_says_what_it_costs(tmp_path: Path) -> None:
    """`convert mla` prints both sides of the trade, and names what it cannot read."""
    write_tiny_folder(tmp_path / "small", "llama")
    text = tmp_path / "text.txt"
    text.write_text("a worker that holds the prefix answers first; " * 20)
    arguments = ("convert", "mla", str(tmp_path / "out"), "--model", str(tmp_path / "small"), "--text", str(text))
    done = conductor(*arguments, "--rope-dim", "16", "--rank", "20", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["original_kv_bytes"], figures["converted_kv_bytes"]) == (3 * 64 * 4, 3 * 36 * 4)
    assert figures["rise"] == pytest.approx(figures["converted_perplexity"] / figures["original_perplexity"] - 1)
    shown = conductor("model", "show", str(tmp_path / "out"), "--json")
    assert json.loads(shown.stdout)["kv_bytes_per_token"] == 3 * 36 * 4
    again = conductor(*arguments)
    assert (again.returncode, "is not empty" in one_line(again.stderr)) == (2, True)
    missing = conductor("convert", "mla", str(tmp_path / "x"), "--text", str(tmp_path / "none"))
    assert (missing.returncode, "No such file" in one_line(missing.stderr)) == (2, True)


def test_help_lists_the_commands() -> None:
    """Whoever types nothing but --help learns what there is, trace commands included."""
    done = conductor_process("--help")
    assert done.returncode == 0
    for command in ("serve", "config", "model", "convert", "explain", "verify", "doctor", "replay"):
        assert command in done.stdout


def test_version_is_printed() -> None:
    assert conductor_process("--version").stdout == "0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("surve",), "error: No such command 'surve'."),
        (("serve", "--port", "x"), "error: --port is 'x'; allowed: a valid integer, unable to parse string as an integer"),
        (("explain",), "error: Missing argument 'ID'. See `conductor explain --help`."),
        (("top", "--onse"), "error: No such option: --onse"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[0],
)
def test_a_mistake_in_use_is_one_line(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, as for every mistake of the caller."""
    monkeypatch.setattr(sys, "argv", ["conductor", *arguments])
    assert usage.run(app) == 2
    assert one_line(capsys.readouterr().err).startswith(message)


def test_help_and_its_absence_are_no_mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((("--help",), 0), (("config",), 2)):
        monkeypatch.setattr(sys, "argv", ["conductor", *arguments])
        assert usage.run(app) == code
        shown = capsys.readouterr()
        assert "Usage" in shown.out + shown.err
        assert "error:" not in shown.err


def test_config_show_tells_where_each_value_came_from() -> None:
    """Every key, with its source."""
    done = conductor("config", "show", "--json", environment={"CONDUCTOR__GATEWAY__PORT": "9001"})
    shown = json.loads(done.stdout)
    assert list(shown) == all_keys()
    assert shown["gateway.port"] == {"value": 9001, "source": "environment CONDUCTOR__GATEWAY__PORT"}
    assert shown["gateway.host"]["source"] == "default"


def test_config_show_is_a_table_for_people() -> None:
    """Key, value and source in one row."""
    done = conductor("config", "show", environment={"CONDUCTOR__GATEWAY__PORT": "9001"})
    (row,) = [line.strip() for line in done.stdout.splitlines() if line.strip().startswith("gateway.port ")]
    assert row.split(maxsplit=2) == ["gateway.port", "9001", "environment CONDUCTOR__GATEWAY__PORT"]


def test_config_check_accepts_a_valid_file_and_names_the_fault_of_another(tmp_path: Path) -> None:
    """One line on standard error, exit code 2."""
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("workers: {prefill: 4}\n")
    bad.write_text("workers: {prefil: 4}\n")
    assert conductor("config", "check", "--config", str(good)).stdout == "the configuration is valid\n"
    done = conductor("config", "check", "--config", str(bad))
    assert done.returncode == 2
    expected = f"error: unknown configuration key workers.prefil (file {bad}); did you mean workers.prefill?"
    assert one_line(done.stderr) == expected


def test_config_schema_is_a_json_schema() -> None:
    """Editors can check a file against it."""
    schema = json.loads(conductor("config", "schema").stdout)
    assert list(schema["properties"]) == ["cluster", "model", "workers", "store", "scheduler", "gateway", "flight_log"]


def flight_log(path: Path, *, tampered: bool) -> Path:
    scheduler = Scheduler(SchedulerConfig())
    log = FlightLogWriter(path, SchedulerConfig(), segment_bytes=10**6, max_segments=2)
    event = RequestArrived(Request("r1", 64, (1,), 8))
    log.append(1.0, event, [] if tampered else scheduler.handle(event, 1.0))
    log.append(2.0, Tick(), scheduler.handle(Tick(), 2.0))
    log.close()
    return path


def test_verify_accepts_what_the_scheduler_decided(tmp_path: Path) -> None:
    """A recorded run gives identical commands."""
    done = conductor("verify", str(flight_log(tmp_path / "a.flight.jsonl", tampered=False)))
    assert (done.returncode, done.stdout) == (0, "2 records: identical commands\n")


def test_verify_fails_on_a_difference_and_on_a_damaged_file(tmp_path: Path) -> None:
    """A different decision is exit code 1, a file that is no log is 2."""
    done = conductor("verify", str(flight_log(tmp_path / "a.flight.jsonl", tampered=True)))
    assert done.returncode == 1
    assert "record 1 at 1.0: RequestArrived" in done.stderr
    (tmp_path / "b.flight.jsonl").write_text("{}\n")
    done = conductor("verify", str(tmp_path / "b.flight.jsonl"))
    assert done.returncode == 2
    assert "line 1: field schema = None is not allowed" in one_line(done.stderr)


class Decisions(http.server.BaseHTTPRequestHandler):
    """A gateway that knows one decision."""

    def do_GET(self) -> None:
        known = self.path == "/v1/decisions/r1"
        body = json.dumps({"request_id": "r1", "candidates": [{"worker": "p0", "ttft": {"queue_s": 0.25}}]} if known else {})
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def gateway() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Decisions)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_explain_shows_every_candidate_with_its_terms(gateway: str) -> None:
    """A table for people, the record itself with --json."""
    done = conductor("explain", "r1", "--url", gateway)
    assert done.returncode == 0
    assert "ttft.queue_s" in done.stdout
    assert "0.25" in done.stdout
    assert json.loads(conductor("explain", "r1", "--url", gateway, "--json").stdout)["request_id"] == "r1"


def test_explain_tells_an_unknown_id_from_a_gateway_that_does_not_answer(gateway: str) -> None:
    """Exit code 2 and 3, one line each."""
    done = conductor("explain", "r2", "--url", gateway)
    assert (done.returncode, one_line(done.stderr)) == (2, f"error: no decision with id 'r2' at {gateway}")
    done = conductor("explain", "r2", "--url", "http://127.0.0.1:9")
    assert done.returncode == 3
    assert one_line(done.stderr).startswith("error: http://127.0.0.1:9 does not answer:")


def test_serve_refuses_a_taken_port_before_anything_starts() -> None:
    """One line, exit code 3."""
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        done = conductor_process("serve", "--port", str(port))
    assert done.returncode == 3
    assert one_line(done.stderr).startswith(f"error: cannot serve on 127.0.0.1:{port}: the port is taken")


def test_serve_says_at_once_that_the_cluster_to_join_does_not_answer() -> None:
    """Ray would try for minutes; exit code 3."""
    done = conductor_process("serve", "--port", "0", "--address", "127.0.0.1:9")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("error: cluster.address 127.0.0.1:9 does not answer: ")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("--port", "99999"), {}, "error: gateway.port = 99999 (flag) is not allowed: "),
        ((), {"CONDUCTOR__SCHEDULER__POLICY": "7"}, "error: scheduler.policy = 7 (environment CONDUCTOR__SCHEDULER__POLICY)"),
        (("--port", "0", "--flight-log", "/dev/null"), {}, "error: flight_log.directory is '/dev/null'; allowed: a directory"),
        (("--port", "0"), {"CONDUCTOR__GATEWAY__KEYS_FILE": "/no/keys.yaml"}, "error: cannot read the keys file /no/keys.yaml"),
        (("--port", "0", "--model", "no-such-model"), {}, "error: model 'no-such-model' is unknown; allowed: "),
    ],
)
def test_serve_refuses_what_it_cannot_use(arguments: tuple[str, ...], environment: dict[str, str], message: str) -> None:
    """The last line says what is wrong, exit code 2."""
    done = conductor("serve", *arguments, environment=environment)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "no-such-model"), "model 'no-such-model' is unknown"),
        (("--cluster", "/no/such/folder/x.yaml"), "--cluster /no/such/folder/x.yaml is not allowed"),
    ],
)
def test_profile_refuses_what_it_cannot_use_before_it_measures(arguments: tuple[str, ...], message: str) -> None:
    done = conductor_process("profile", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Ray" not in done.stderr


def test_a_key_is_shown_once_with_the_line_for_the_keys_file() -> None:
    """The hash is of that key; a bad tenant name is bad input."""
    shown = json.loads(conductor("key", "new", "--tenant", "acme", "--json").stdout)
    assert shown["hash"] == "sha256:" + hashlib.sha256(shown["key"].encode()).hexdigest()
    plain = conductor("key", "new", "--tenant", "acme")
    assert plain.stdout.startswith("ck-")
    assert "sha256:" in plain.stderr
    assert conductor("key", "new", "--tenant", "a b").returncode == 2
