"""Server-sent events onto a socket that may be slow or idle.

Every event is written at once, by the task that produced it, so a slow client slows its own producer down. One timer a stream
does what waiting with a timeout for each event would do at a cost for each token: it sends a comment when nothing was sent for
a while (proxies cut silent connections), and cancels the task of a client that does not read.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Send

from conductor.gateway.formats import KEEP_ALIVE
from conductor.gateway.settings import GatewaySettings


class EventSender:
    """Mutable; one for each stream; an asynchronous context of the task that produces the events."""

    def __init__(self, send: Send, settings: GatewaySettings) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._keep_alive_s = settings.keep_alive_comment_s
        self._send_timeout_s = settings.send_timeout_s
        self._producer = asyncio.current_task()
        self._writing = 0
        self._last_progress_s = self._loop.time()
        self._comment: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stalled = False

    async def __aenter__(self) -> Self:
        self._schedule()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """True swallows the cancellation that a stalled client caused: its stream just ends."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()
        stalled = self._stalled and kind is not None and issubclass(kind, asyncio.CancelledError)
        return stalled and self._producer is not None and self._producer.uncancel() == 0

    async def write(self, data: bytes) -> None:
        """Returns when the client has room for more."""
        if not data:
            return
        self._writing += 1
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self._writing -= 1
        self._last_progress_s = self._loop.time()

    async def end(self, data: bytes) -> None:
        """Write the last events and end the body."""
        self._writing += 1
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def _schedule(self) -> None:
        period_s = min(self._keep_alive_s, self._send_timeout_s) / 4
        self._timer = self._loop.call_later(period_s, self._look)

    def _look(self) -> None:
        idle_s = self._loop.time() - self._last_progress_s
        if self._writing and idle_s >= self._send_timeout_s and self._producer is not None:
            self._stalled = True
            self._producer.cancel()
            return
        if not self._writing and idle_s >= self._keep_alive_s:
            self._comment = asyncio.ensure_future(self.write(KEEP_ALIVE))
        self._schedule()
