"""Conductor as Ray jobs on a running cluster, as its owners submit them: compare, serve and replay, with and without tokens."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.bench.served import ROOT, free_port, is_ready
from tests.live.observe import MODEL, eventually

pytestmark = [pytest.mark.live, pytest.mark.slow]

BIN = Path(sys.executable).parent
CONDUCTOR = ("python", "-m", "conductor")


def dashboard_port() -> int:
    """Ray's workers listen between 10002 and 19999, so the dashboard must not."""
    while 10_000 <= (port := free_port()) < 20_000:
        pass
    return port


@dataclass(frozen=True)
class Head:
    """A running cluster, and what its owner submits with."""

    url: str
    environment: dict[str, str]
    directory: Path

    def submit(self, *command: str, wait: bool = True, name: str | None = None) -> subprocess.CompletedProcess[str]:
        options = ["--address", self.url, "--working-dir", str(self.directory), *([] if wait else ["--no-wait"])]
        options += [] if name is None else ["--submission-id", name]
        return self.ray("job", "submit", *options, "--", *command)

    def ray(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(BIN / "ray"), *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=200, check=False)


@contextmanager
def head_node(directory: Path, **auth: str) -> Iterator[Head]:
    """`ray start --head` in a process that ends with the test."""
    port, gcs = dashboard_port(), free_port()
    temporary = Path(tempfile.mkdtemp(prefix="ray-"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **auth}
    command = [str(BIN / "ray"), "start", "--head", "--block", "--port", str(gcs), "--num-cpus", "4"]
    command += ["--dashboard-port", str(port), "--object-store-memory", str(200 * 2**20), "--temp-dir", str(temporary)]
    with (temporary / "head.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        tree = psutil.Process(process.pid)
        try:
            head = Head(f"http://127.0.0.1:{port}", environment, directory)
            eventually(lambda: head.submit("python", "-c", "pass").returncode == 0)  # jobs are taken later than they are listed
            yield head
        finally:
            everybody = [tree, *tree.children(recursive=True)]
            process.send_signal(signal.SIGTERM)
            _, alive = psutil.wait_procs(everybody, timeout=20)
            for left in alive:
                left.kill()
            process.wait()
    shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A working directory with a trace in it."""
    made = tmp_path / "job"
    made.mkdir()
    generate = ["trace", "generate", "conversation", str(made / "trace.jsonl"), "--requests", "6", "--seed", "1"]
    subprocess.run([sys.executable, *CONDUCTOR[1:], *generate], cwd=ROOT, check=True, capture_output=True)
    return made


def compare(head: Head) -> None:
    """The report is in the job's log."""
    cells = ["--prefill", "1", "--decode", "1", "--policies", "random,conductor", "--speeds", "1"]
    compared = head.submit(*CONDUCTOR, "compare", "trace.jsonl", "--cluster", "dynamo-mocker", *cells)
    assert compared.returncode == 0, compared.stdout[-2000:] + compared.stderr[-2000:]
    assert "conductor" in compared.stdout
    assert "random" in compared.stdout


def serve_and_replay(head: Head) -> None:
    """One job serves the real model, another replays a trace against it; the service is gone when its job is stopped."""
    port = free_port()
    serve = ["serve", "--port", str(port), "--prefill", "1", "--decode", "1", "--flight-log", "flight"]
    started = head.submit(*CONDUCTOR, *serve, wait=False, name="serving")
    assert started.returncode == 0, started.stderr
    eventually(lambda: is_ready(port), within_s=120)
    body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
    assert "Paris" in answer["choices"][0]["text"]

    replay = ["replay", "trace.jsonl", "--url", f"http://127.0.0.1:{port}", "--scale", "0.005", "--speed", "4"]
    replayed = head.submit(*CONDUCTOR, *replay, "--json", "-")
    assert replayed.returncode == 0, replayed.stdout[-2000:] + replayed.stderr[-2000:]
    figures, _ = json.JSONDecoder().raw_decode(replayed.stdout[replayed.stdout.index("{\n") :])
    assert (figures["requests"], figures["completed"]) == (6, 6)

    assert head.ray("job", "stop", "--address", head.url, "serving").returncode == 0
    eventually(lambda: not is_ready(port))


def test_jobs_on_a_cluster_with_token_authentication(directory: Path, tmp_path: Path) -> None:
    """All three commands; who has no token cannot even list the jobs."""
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    with head_node(directory, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token)) as head:
        stranger = Head(head.url, {**head.environment, "RAY_AUTH_MODE": "disabled"}, directory)
        assert stranger.ray("job", "list", "--address", head.url).returncode != 0
        compare(head)
        serve_and_replay(head)


def test_a_job_on_a_cluster_without_authentication(directory: Path) -> None:
    with head_node(directory, RAY_AUTH_MODE="disabled") as head:
        compare(head)
