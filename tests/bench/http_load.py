"""A small closed-loop HTTP/1.1 load generator on raw asyncio streams, light enough to share two cores with what it measures.

It reads exactly what the server says it sends (content-length or chunks), on kept-alive connections, and fails on any status
but 200.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

import uvloop


@dataclass(frozen=True)
class Load:
    """`connections` clients repeat one request until `duration_s` is over, or once each if that is None."""

    host: str
    port: int
    path: str
    body: dict[str, object]
    connections: int
    duration_s: float | None


@dataclass
class Outcome:
    elapsed_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def requests_per_s(self) -> float:
        return len(self.latencies_s) / self.elapsed_s

    def quantile_s(self, share: float) -> float:
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def encode(load: Load) -> bytes:
    body = json.dumps(load.body).encode()
    lines = (
        f"POST {load.path} HTTP/1.1",
        f"host: {load.host}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + body


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """The body of one answer; raises ValueError on a status that is not 200."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" in head:
        body = await read_chunks(reader)
    else:
        start = head.index(b"content-length:") + len(b"content-length:")
        body = await reader.readexactly(int(head[start : head.index(b"\r\n", start)]))
    if not head.startswith(b"http/1.1 200"):
        raise ValueError(f"{head.splitlines()[0]!r}: {body[:200]!r}")
    return body


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readexactly(2)
    return b"".join(parts)


async def client(load: Load, request: bytes, until_s: float, outcome: Outcome) -> None:
    reader, writer = await asyncio.open_connection(load.host, load.port)
    try:
        while True:
            started_s = time.perf_counter()
            writer.write(request)
            await read_answer(reader)
            outcome.latencies_s.append(time.perf_counter() - started_s)
            if time.perf_counter() >= until_s:
                return
    except (ValueError, OSError, asyncio.IncompleteReadError) as problem:
        outcome.errors.append(repr(problem))
    finally:
        writer.close()


async def drive(load: Load) -> Outcome:
    outcome = Outcome()
    request = encode(load)
    started_s = time.perf_counter()
    until_s = started_s + (load.duration_s or 0.0)
    await asyncio.gather(*(client(load, request, until_s, outcome) for _ in range(load.connections)))
    outcome.elapsed_s = time.perf_counter() - started_s
    return outcome


def run_load(load: Load) -> Outcome:
    """Drive a load on an event loop of its own."""
    return uvloop.run(drive(load))
