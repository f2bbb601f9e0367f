"""A `conductor serve` process of its own, and the smallest client that can time its first token."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent.parent
READY_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class FirstToken:
    """What a client saw of one streamed completion."""

    ttft_s: float
    headers: Mapping[str, str]
    usage: Mapping[str, object]

    @property
    def predicted_s(self) -> float:
        return float(self.headers["x-conductor-predicted-ttft-ms"]) / 1000

    @property
    def worker(self) -> str:
        return self.headers["x-conductor-prefill-worker"]

    @property
    def hit_tokens(self) -> int:
        return int(str(self.usage["prompt_cache_hit_tokens"]))


@dataclass(frozen=True)
class Served:
    port: int
    ready_s: float
    process: psutil.Process

    def complete(self, prompt: Sequence[int] | str, max_tokens: int = 2, **options: object) -> FirstToken:
        """Stream one greedy completion and time its first token from before the connection is opened."""
        body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "ignore_eos": True, **options}
        started = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {response.read().decode()}")
        first_s: float | None = None
        usage: Mapping[str, object] = {}
        for event in stream_events(response):
            if first_s is None and event.get("choices"):
                first_s = time.perf_counter() - started
            usage = event.get("usage") or usage
        connection.close()
        if first_s is None:
            raise RuntimeError("the stream ended without a token")
        return FirstToken(first_s, {name.lower(): value for name, value in response.getheaders()}, usage)

    def resident_bytes(self) -> int:
        """Resident memory of the whole process tree; pages shared between processes count in each."""
        return sum(process.memory_info().rss for process in self.tree())

    def proportional_bytes(self) -> int:
        """The same with every shared page divided by its users."""
        return sum(process.memory_full_info().pss for process in self.tree())

    def tree(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


def stream_events(response: http.client.HTTPResponse) -> Iterator[dict[str, object]]:
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@contextmanager
def serve(*arguments: str) -> Iterator[Served]:
    """Start `conductor serve` on a free port, wait until it is ready, and stop it afterwards."""
    port = free_port()
    log_path = Path(tempfile.mkstemp(suffix=".log")[1])
    started = time.perf_counter()
    command = [sys.executable, "-m", "conductor", "serve", "--port", str(port), *arguments]
    with log_path.open("w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        while not is_ready(port):
            if child.poll() is not None or time.perf_counter() - started > READY_TIMEOUT_S:
                raise RuntimeError(f"`{' '.join(command)}` did not get ready:\n{log_path.read_text()[-4000:]}")
            time.sleep(0.1)
        yield Served(port, time.perf_counter() - started, psutil.Process(child.pid))
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        log_path.unlink()
