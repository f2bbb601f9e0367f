"""How an answer leaves: a whole JSON body or a stream of events, ended early when the client goes away.

`answer` runs a request against two other endings: the client disconnects, or the task itself is cancelled (server shutting
down). In each case `Run.close` runs exactly once, which is what cancels the request in the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Send

from conductor.core.types import Placement
from conductor.gateway.assembler import Delta
from conductor.gateway.errors import DECISION_ID_HEADER, ApiError
from conductor.gateway.event_sender import EventSender
from conductor.gateway.formats import DONE, Format, Usage, Whole
from conductor.gateway.generation import Run
from conductor.gateway.settings import GatewaySettings
from conductor.gateway.waiting_room import Turn

JSON = "application/json"
WATCH_AFTER_S = 0.02
EVENT_STREAM = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Answer:
    """One request ready to run, and how its answer is written."""

    run: Run
    format: Format
    turn: Turn
    stream: bool
    include_usage: bool
    settings: GatewaySettings


async def answer(work: Answer, receive: Receive, send: Send) -> None:
    """Wait for the turn, submit, and send the whole answer; raises `ApiError` if nothing was sent yet."""
    try:
        await until_gone(receive, _in_turn(work, send))
    finally:
        await work.run.close()


async def _in_turn(work: Answer, send: Send) -> None:
    async with work.turn:
        await (_stream(work, send) if work.stream else _whole(work, send))


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it when the client disconnects."""
    watch = DisconnectWatch(receive)
    try:
        await work
    except asyncio.CancelledError:
        if not watch.took_back_cancellation():
            raise
    finally:
        watch.stop()


class DisconnectWatch:
    """Cancels the task that made it when the client disconnects.

    It begins to listen after `WATCH_AFTER_S`: short requests, refusals above all, end before and are spared the cost.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task = asyncio.current_task()
        self._listener: asyncio.Future[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._listen)
        self._stopped = False
        self._cancelled = False

    def stop(self) -> None:
        self._stopped = True
        self._timer.cancel()
        if self._listener is not None:
            self._listener.cancel()

    def took_back_cancellation(self) -> bool:
        """True when the cancellation that has just arrived is this watch's, and nobody else's; it is then undone."""
        return self._cancelled and self._task is not None and self._task.uncancel() == 0

    def _listen(self) -> None:
        self._listener = asyncio.ensure_future(_disconnected(self._receive))
        self._listener.add_done_callback(self._on_disconnect)

    def _on_disconnect(self, listener: asyncio.Future[None]) -> None:
        if not self._stopped and not listener.cancelled() and self._task is not None:
            self._cancelled = True
            self._task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(work: Answer, send: Send) -> None:
    placements = await work.run.submit()
    wholes = [Whole([], []) for _ in work.run.choices]

    async def collect(index: int, delta: Delta) -> None:
        wholes[index].add(delta)

    await work.run.follow(collect)
    await send_body(send, 200, work.format.whole(wholes, usage_of(work.run)), headers=placement_headers(placements))


async def _stream(work: Answer, send: Send) -> None:
    placements = await work.run.submit()
    await send_start(send, 200, EVENT_STREAM, placement_headers(placements) | {"cache-control": "no-cache"})
    async with EventSender(send, work.settings) as events:
        await _produce(work, events)


async def _produce(work: Answer, events: EventSender) -> None:
    """Send every event of the answer; an error after the start is an event too."""
    await events.write(work.format.opening(len(work.run.choices)))
    try:
        await work.run.follow(lambda index, delta: events.write(work.format.delta(index, delta)))
    except ApiError as problem:
        last = b"data: " + problem.body() + b"\n\n"
    else:
        last = work.format.usage(usage_of(work.run)) if work.include_usage else b""
    await events.end(last + DONE)


def usage_of(run: Run) -> Usage:
    return Usage(run.plan.prompt_tokens, run.output_tokens, run.reused_tokens)


def placement_headers(placements: Sequence[Placement]) -> dict[str, str]:
    """Ids and workers of all choices, and what the first was promised."""
    first = placements[0]
    headers = {
        DECISION_ID_HEADER: ",".join(placement.request_id for placement in placements),
        "x-conductor-prefill-worker": ",".join(placement.prefill for placement in placements),
        "x-conductor-reused-tokens": str(first.reuse.reused_tokens),
        "x-conductor-predicted-ttft-ms": f"{first.ttft.total_s * 1000:.1f}",
    }
    decode = ",".join(placement.decode for placement in placements if placement.decode is not None)
    return headers | {"x-conductor-decode-worker": decode} if decode else headers


async def send_error(send: Send, problem: ApiError) -> None:
    await send_body(send, problem.status, problem.body(), headers=problem.headers)


async def send_body(
    send: Send, status: int, body: bytes, *, kind: str = JSON, headers: Mapping[str, str] | None = None
) -> None:
    await send_start(send, status, kind, {"content-length": str(len(body)), **(headers or {})})
    await send({"type": "http.response.body", "body": body})


async def send_start(send: Send, status: int, kind: str, headers: Mapping[str, str]) -> None:
    encoded = [(name.encode("latin-1"), value.encode("latin-1", errors="replace")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode()), *encoded]})
