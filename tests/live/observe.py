"""What live tests do and see from outside: requests, metrics, processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import psutil

from tests.bench.served import Served

MODEL = "smollm2-135m"
STORY = "The lighthouse keeper wrote in his journal every evening about the sea and the ships that passed. "


def metric(served: Served, name: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{served.port}/metrics", timeout=10).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))


def eventually(condition: Callable[[], bool], within_s: float = 90) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def ready(served: Served) -> bool:
    return httpx.get(f"http://127.0.0.1:{served.port}/ready", timeout=10).status_code == 200


def whole(served: Served) -> bool:
    """Every worker is back and nothing is in flight."""
    return ready(served) and len(workers(served)) == 3 and metric(served, "conductor_cluster_in_flight") == 0


def workers(served: Served, actor_class: str = "") -> list[psutil.Process]:
    """Worker processes, which Ray titles `ray::PrefillWorker...` and `ray::DecodeWorker...`."""
    titles = (f"ray::{actor_class}",) if actor_class else ("ray::PrefillWorker", "ray::DecodeWorker")
    found = []
    for process in served.tree():
        with contextlib.suppress(psutil.Error):
            if "".join(process.cmdline()[:1]).startswith(titles):
                found.append(process)
    return found


def host_memory(served: Served) -> set[Path]:
    """The directories of shared memory that workers have open."""
    opened = [Path(file.path) for process in workers(served) for file in process.open_files()]
    return {path.parent for path in opened if path.name == "owners"}


def busiest(processes: list[psutil.Process]) -> psutil.Process:
    """Whoever computes right now."""
    before = [process.cpu_times().user for process in processes]
    time.sleep(0.4)
    spent = [process.cpu_times().user - start for process, start in zip(processes, before, strict=True)]
    return processes[spent.index(max(spent))]


def stream(
    client: openai.OpenAI, prompt: str, max_tokens: int, on_text: Callable[[int], None] = lambda count: None
) -> list[str]:
    """The pieces of a greedy completion."""
    pieces: list[str] = []
    chunks = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    for chunk in chunks:
        pieces.append(chunk.choices[0].text)
        on_text(len(pieces))
    return pieces
