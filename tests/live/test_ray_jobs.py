"""Conductor as jobs on running Ray clusters, submitted as the README shows: serve, replay and compare, with tokens and without.

Two clusters start at once, each on ports of its own: one that finds the port of Ray's job agent taken starts all the same, and
refuses every job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.bench.served import ROOT, free_port, is_ready
from tests.live.observe import MODEL, eventually

pytestmark = [pytest.mark.live, pytest.mark.slow]

BIN = Path(sys.executable).parent
NO_AGENT_YET = "No available agent"
README_JOBS = re.findall(r"^ray job submit .* -- python -m conductor .*$", (ROOT / "README.md").read_text("utf-8"), flags=re.M)


def documented(command: str) -> str:
    """The README's submission of one of our commands."""
    (line,) = (line for line in README_JOBS if f"conductor {command} " in line)
    return line


@dataclass(frozen=True)
class Head:
    """A running cluster, and what its owner submits with."""

    url: str
    environment: dict[str, str]
    directory: Path

    def submit(self, line: str) -> str:
        """Run a submission and return what it printed; waits until the cluster takes jobs."""
        deadline = time.monotonic() + 90
        while NO_AGENT_YET in (done := self.ray(line.replace("http://HEAD:8265", self.url))).stderr:
            assert time.monotonic() < deadline, "the cluster takes no jobs"
            time.sleep(0.5)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    def ray(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            line, shell=True, cwd=self.directory, env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )


@contextmanager
def head_node(directory: Path, workers_from: int, **auth: str) -> Iterator[Head]:
    """`ray start --head` in a process that ends with the test; workers listen on a thousand ports from `workers_from`."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    temporary = Path(tempfile.mkdtemp(prefix="ray-"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **auth}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_JOB_STOP_WAIT_TIME_S": "60"}
    command = [str(BIN / "ray"), "start", "--head", "--block", "--port", str(free_port()), "--num-cpus", "4"]
    command += ["--dashboard-port", str(port), "--dashboard-agent-listen-port", str(free_port())]
    command += ["--ray-client-server-port", str(free_port()), "--min-worker-port", str(workers_from)]
    command += ["--max-worker-port", str(workers_from + 999)]
    command += ["--object-store-memory", str(200 * 2**20), "--temp-dir", str(temporary)]
    with (temporary / "head.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Head(url, environment, directory)
    finally:
        for each in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()  # an orderly end takes seconds, and nothing here outlives the directory
        process.wait(timeout=60)
        shutil.rmtree(temporary, ignore_errors=True)


@dataclass(frozen=True)
class Heads:
    guarded: Head
    open: Head


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Heads]:
    """Both answer; their working directory has a trace in it."""
    directory, token = tmp_path_factory.mktemp("job"), tmp_path_factory.mktemp("auth") / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    with ExitStack() as stack:
        guarded = head_node(directory, 20_000, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
        without = head_node(directory, 21_000, RAY_AUTH_MODE="disabled")
        heads = Heads(stack.enter_context(guarded), stack.enter_context(without))
        generate = [sys.executable, "-m", "conductor", "trace", "generate", "conversation", str(directory / "trace.jsonl")]
        subprocess.run([*generate, "--requests", "6", "--seed", "1"], cwd=ROOT, check=True, capture_output=True)
        eventually(lambda: answers(heads.guarded.url) and answers(heads.open.url))
        yield heads


def answers(url: str) -> bool:
    """Whether anything does, with a token or without."""
    try:
        return httpx.get(f"{url}/api/version", timeout=5).status_code in (200, 401)
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def serving(heads: Heads) -> int:
    """The port of a job that serves the real model; it may not be ready yet."""
    port = free_port()
    command = documented("serve").replace(" -- ", " --submission-id serving -- ")
    heads.guarded.submit(f"{command} --port {port} --prefill 1 --decode 1 --flight-log flight")
    return port


def check_report(printed: str) -> None:
    """A row for each policy, from within the job."""
    assert "TTFT mean" in printed
    for policy in ("random", "conductor"):
        assert re.search(rf"^│ {policy} .*100\.0%", printed, flags=re.M), printed


@pytest.mark.usefixtures("serving")
def test_a_comparison_comes_back_from_a_cluster_with_tokens(heads: Heads) -> None:
    """Whoever has no token cannot even list the jobs."""
    stranger = Head(heads.guarded.url, {**heads.guarded.environment, "RAY_AUTH_MODE": "disabled"}, heads.guarded.directory)
    refused = stranger.ray(f"ray job list --address {stranger.url}")
    assert refused.returncode != 0
    assert "Missing authentication token" in refused.stderr
    check_report(heads.guarded.submit(documented("compare")))


def test_one_job_serves_and_another_replays_against_it(heads: Heads, serving: int) -> None:
    """Stopping the job stops the service, and leaves none of its actors."""
    eventually(lambda: is_ready(serving), within_s=120)
    body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{serving}/v1/completions", json=body, timeout=60).json()
    assert "Paris" in answer["choices"][0]["text"]

    replay = documented("replay").replace("http://localhost:8000", f"http://127.0.0.1:{serving}")
    printed = heads.guarded.submit(f"{replay} --json -")
    figures, _ = json.JSONDecoder().raw_decode(printed[printed.index("{\n") :])
    assert (figures["requests"], figures["completed"]) == (6, 6)

    stopped = heads.guarded.ray(f"ray job stop --address {heads.guarded.url} serving")
    assert stopped.returncode == 0, stopped.stderr
    assert not is_ready(serving)
    log = heads.guarded.ray(f"ray job logs --address {heads.guarded.url} serving").stdout
    assert "stopping the workers" in log


def test_a_comparison_comes_back_from_a_cluster_without_tokens(heads: Heads) -> None:
    check_report(heads.open.submit(documented("compare")))
