"""`conductor serve` as its users meet it: a real model behind the OpenAI client, killed workers, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from conductor.core.config import SchedulerConfig
from conductor.core.scheduler import Scheduler
from conductor.flight_log import verify
from tests.bench.served import ROOT, Served
from tests.live.observe import MODEL, STORY, eventually, metric, ready, whole, workers

pytestmark = [pytest.mark.live, pytest.mark.slow]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_chat_answers_and_streams_the_same(client: openai.OpenAI) -> None:
    """Greedy decoding gives one text, streamed or not."""
    question = [{"role": "user", "content": "Name three colours."}]
    options = {"model": MODEL, "messages": question, "max_tokens": 24, "temperature": 0}
    whole_answer = client.chat.completions.create(**options)  # type: ignore[call-overload]
    chunks = client.chat.completions.create(**options, stream=True)  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole_answer.choices[0].message.content == text
    assert len(text) > 0


def test_a_repeated_prefix_is_answered_from_cache(client: openai.OpenAI) -> None:
    """Usage says how much, and the text is the same with and without reuse."""
    prompt = STORY * 12
    first = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
    second = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    reused = second.usage.prompt_tokens_details.cached_tokens
    assert reused == (first.usage.prompt_tokens - 1) // 64 * 64
    assert second.choices[0].text == first.choices[0].text


def test_a_decision_can_be_explained(served: Served) -> None:
    """The response header names the decision, and every candidate is in the record."""
    answer = httpx.post(
        f"http://127.0.0.1:{served.port}/v1/completions",
        json={"model": MODEL, "prompt": "Hello", "max_tokens": 2},
        timeout=60,
    )
    decision_id = answer.headers["x-conductor-decision-id"]
    command = [sys.executable, "-m", "conductor", "explain", decision_id, "--url", f"http://127.0.0.1:{served.port}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "prefill-0" in shown
    assert "prefill-1" in shown


def test_a_client_that_leaves_stops_its_request(served: Served) -> None:
    """Nothing stays in flight."""
    body = {"model": MODEL, "prompt": STORY, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"http://127.0.0.1:{served.port}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    eventually(lambda: metric(served, "conductor_cluster_in_flight") == 0, within_s=20)


def test_without_workers_there_is_a_reason_and_a_recovery(served: Served, client: openai.OpenAI) -> None:
    """503 while no prefill worker lives, and no restart of the service afterwards."""
    for process in workers(served, "PrefillWorker"):
        process.kill()
    eventually(lambda: not ready(served), within_s=20)
    with pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(model=MODEL, prompt="Hello", max_tokens=2)
    assert refused.value.status_code == 503
    assert "no prefill worker" in str(refused.value)
    eventually(lambda: whole(served))
    client.completions.create(model=MODEL, prompt="Hello", max_tokens=2)


def test_the_flight_log_of_all_this_verifies(served: Served, client: openai.OpenAI, log_directory: Path) -> None:
    """Kills and cancellations included, a fresh scheduler gives the identical commands."""
    time.sleep(1.2)
    client.completions.create(model=MODEL, prompt="Hello", max_tokens=2)
    (log,) = log_directory.glob("*.flight.jsonl")
    outcome = verify(log, SchedulerConfig, Scheduler)
    assert outcome.difference is None
    assert outcome.records > 50


def left_over(marker: str) -> list[str]:
    """Processes that inherited the marker from a `serve` that has ended, once they have had time to go."""

    def alive() -> list[str]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SERVE_TEST_MARKER") == marker:
                    found.append(" ".join(process.cmdline()))
        return found

    deadline = time.monotonic() + 20
    while (found := alive()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def failed_serve(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A `serve` that cannot begin; checks that no process is left of it."""
    marker = uuid.uuid4().hex
    command = [sys.executable, "-m", "conductor", "serve", "--port", "0", *arguments]
    env = {**os.environ, "SERVE_TEST_MARKER": marker, **(environment or {})}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False, env=env)
    assert left_over(marker) == []
    return done


def test_a_damaged_model_file_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """A folder whose weights are cut short."""
    from models.folder import find_model

    folder = tmp_path / "damaged"
    shutil.copytree(find_model(MODEL).path, folder)
    for weights in folder.glob("*.safetensors"):
        os.truncate(weights, 1000)
    done = failed_serve("--model", str(folder))
    assert done.returncode in (1, 2)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert ".safetensors" in last


def test_too_little_memory_is_one_line_before_anything_starts() -> None:
    """A cache that no machine holds."""
    done = failed_serve(environment={"CONDUCTOR__WORKERS__PREFILL_BLOCKS": "100000000"})
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: not enough memory: ")


def test_a_signal_during_the_start_leaves_nothing() -> None:
    """SIGTERM before anything is ready: exit code 130, no process left."""
    command = [sys.executable, "-m", "conductor", "serve", "--port", "0"]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    while "starting the Conductor" not in child.stderr.readline():
        assert child.poll() is None
    tree = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(signal.SIGTERM)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130
    assert stderr.strip().splitlines()[-1] == "error: stopped before it was ready"
    _, alive = psutil.wait_procs(tree, timeout=20)
    assert alive == []
