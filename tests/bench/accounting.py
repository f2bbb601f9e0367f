"""Many requests of mixed size, some of whose clients leave, on workers some of which are killed: every one ends exactly once.

The clients are raw sockets. Each request is streamed; a client that stays reads to the end and knows which text it must get; a
client that leaves closes its socket after some events, before the answer's head in one case of four; one that is refused comes
back a little later. What the gateway, the Conductor and the workers still hold afterwards is asked from the process itself
(`stand_in_gateway.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.doubles.byte_tokenizer import ByteTokenizer
from tests.live.stand_in_workers import expected_tokens

ROOT = Path(__file__).parents[2]
LEAVING_SHARE = 0.2
SETTLE_S = 20.0


@dataclass
class Verdicts:
    """How the requests ended, as their clients saw it; and how often they were refused before."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """One request: its size, and after how many events its client leaves (None: it stays; 0: before the head)."""

    first: int
    prompt_tokens: int
    max_tokens: int
    leaves_after: int | None


class Process:
    """A gateway in a process of its own, and the line to it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._process = process
        self.port = int(process.stdout.readline())

    def ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def stand_in_gateway() -> Iterator[Process]:
    command = [sys.executable, "-m", "tests.bench.stand_in_gateway"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONMALLOC": "malloc"}  # one allocator, which can be asked
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Process(process)
        finally:
            process.kill()


def plans(count: int, seed: int) -> list[Plan]:
    """Mostly short prompts and answers, some long ones."""
    rng = Random(seed)
    drawn = []
    for _ in range(count):
        size = rng.choice((8, 8, 40, 40, 200, 1500))
        tokens = rng.choice((1, 4, 12, 12, 30, 80))
        leaves = rng.choice((0, 1, 2, 5)) if rng.random() < LEAVING_SHARE else None
        drawn.append(Plan(rng.randrange(200), size, tokens, leaves))
    return drawn


def encode(plan: Plan) -> bytes:
    prompt = [plan.first, *range(1, plan.prompt_tokens)]
    body = {"model": "stand-in", "prompt": [token % 250 for token in prompt], "max_tokens": plan.max_tokens, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(text)}\r\n\r\n"
    return head.encode() + text


async def drive(port: int, work: list[Plan], connections: int, verdicts: Verdicts) -> None:
    """`connections` clients at a time."""
    queue = iter(work)

    rng = Random(3)

    async def client() -> None:
        for plan in queue:
            while (verdict := await one(port, plan, verdicts)).startswith("refused"):
                verdicts.refusals[verdict] += 1
                await asyncio.sleep(rng.uniform(0.05, 0.3))
            verdicts.counts[verdict] += 1

    await asyncio.gather(*(client() for _ in range(connections)))


async def one(port: int, plan: Plan, verdicts: Verdicts) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(encode(plan))
        await writer.drain()
        if plan.leaves_after == 0:
            await asyncio.sleep(0.01)
            return "left"
        status = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        if status != b"200":
            return await refusal(reader, status, verdicts)
        return await answer(reader, plan, verdicts)
    finally:
        writer.close()


async def refusal(reader: asyncio.StreamReader, status: bytes, verdicts: Verdicts) -> str:
    error = json.loads(await reader.read())["error"]
    if status not in (b"429", b"503") or not error["code"]:
        verdicts.wrong.append(f"{status!r}: {error}")
    return f"refused {error['code']}"


async def answer(reader: asyncio.StreamReader, plan: Plan, verdicts: Verdicts) -> str:
    """Reads chunked events; the chunk sizes between them do not begin with `data:`."""
    text, finishes, done, events, failed, tokens = "", 0, 0, 0, "", None
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        events += 1
        if plan.leaves_after is not None and events > plan.leaves_after:
            return "left"
        if line.strip() == b"data: [DONE]":
            done += 1
            continue
        event = json.loads(line[6:])
        failed = event.get("error", {}).get("code", failed)
        for choice in event.get("choices", ()):
            text += choice["text"]
            finishes += choice["finish_reason"] is not None
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return judge(plan, text, (finishes, done, failed, tokens), verdicts)


def judge(plan: Plan, text: str, ends: tuple[int, int, str, int | None], verdicts: Verdicts) -> str:
    finishes, done, failed, tokens = ends
    wanted = ByteTokenizer().decode(expected_tokens(plan.first, plan.max_tokens))
    if failed:
        if (finishes, done) != (0, 1):
            verdicts.wrong.append(f"failed with {failed}, {finishes} finish reasons and {done} ends: {plan}")
        return f"failed {failed}"
    if (finishes, done, tokens) != (1, 1, plan.max_tokens) or text != wanted:
        verdicts.wrong.append(f"{finishes} finish reasons, {done} ends, {tokens} tokens, {text!r} for {wanted!r}: {plan}")
    return "finished"


async def kill_in_turn(process: Process, workers: list[str], verdicts: Verdicts, requests: int) -> list[dict[str, Any]]:
    """At equal parts of the load, which is faster or slower by machine."""
    killed = []
    for number, worker in enumerate(workers, start=1):
        while verdicts.counts.total() < requests * number // (len(workers) + 1):
            await asyncio.sleep(0.001)
        killed.append(await asyncio.to_thread(process.ask, f"kill {worker}"))
    return killed


async def settled(process: Process) -> dict[str, Any]:
    """The sums once nothing is held any more, or after a while."""
    until = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        sums = await asyncio.to_thread(process.ask, "sums")
        if not any(sums["held"].values()) or asyncio.get_running_loop().time() > until:
            return sums
        await asyncio.sleep(0.2)


@dataclass(frozen=True)
class Run:
    """What came of one run; sums are from before and after it."""

    requests: int
    verdicts: Verdicts
    killed: list[dict[str, Any]]
    before: dict[str, Any]
    after: dict[str, Any]

    def growth(self, of: str) -> float:
        return float(self.after[of] / self.before[of] - 1)

    @property
    def ended(self) -> dict[str, int]:
        """How the scheduler says that requests ended meanwhile."""
        return {name: count - self.before["ended"][name] for name, count in self.after["ended"].items()}


async def run(
    process: Process,
    requests: int,
    *,
    warm_up: int,
    connections: int,
    kills: list[str],
    rest_s: float = 0.0,
) -> Run:
    """Drive a load after a warm-up, in which what grows to its bound may grow. Before memory is looked at, `rest_s` lets what
    is remembered for a while be forgotten."""
    await drive(process.port, plans(warm_up, seed=1), connections, Verdicts())
    await asyncio.sleep(rest_s)
    before = await settled(process)
    verdicts = Verdicts()
    killing = asyncio.create_task(kill_in_turn(process, kills, verdicts, requests))
    await drive(process.port, plans(requests, seed=2), connections, verdicts)
    killed = await killing
    await asyncio.sleep(rest_s)
    return Run(requests, verdicts, killed, before, await settled(process))
