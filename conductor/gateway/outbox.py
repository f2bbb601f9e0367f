"""Between the producer of server-sent events and a socket that may be slow.

The producer puts bytes without waiting; one writer sends whatever has gathered in a single write, adds a comment when
nothing was sent for a while (proxies cut silent connections), and gives up on a client that does not read. `full()` tells
the producer to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.types import Send

from conductor.gateway.formats import KEEP_ALIVE

HIGH_WATER_PARTS = 64


class ClientGone(Exception):
    """The client has disconnected or does not read: nothing more can be sent."""


class Outbox:
    """Mutable; one for each stream. `run` is the writer and ends after `close` once everything is sent."""

    def __init__(self, send: Send, *, keep_alive_s: float, send_timeout_s: float) -> None:
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._send_timeout_s = send_timeout_s
        self._parts: list[bytes] = []
        self._ready = asyncio.Event()
        self._drained = asyncio.Event()
        self._closed = False
        self._broken = False

    def put(self, data: bytes) -> None:
        if self._broken:
            raise ClientGone
        if data:
            self._parts.append(data)
            self._ready.set()

    def full(self) -> Awaitable[None] | None:
        """None while the client keeps up."""
        return self._wait_until_drained() if len(self._parts) >= HIGH_WATER_PARTS else None

    def close(self) -> None:
        self._closed = True
        self._ready.set()

    async def run(self) -> None:
        try:
            while await self._something_to_send():
                await self._write(b"".join(self._take()), more=True)
            await self._write(b"".join(self._take()), more=False)
        except (TimeoutError, OSError):
            self._broken = True
        finally:
            self._drained.set()

    async def _something_to_send(self) -> bool:
        """False once the outbox is closed; whatever is left then goes into the last write."""
        while not self._ready.is_set():
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    await self._ready.wait()
            except TimeoutError:
                await self._write(KEEP_ALIVE, more=True)
        self._ready.clear()
        return not self._closed

    def _take(self) -> list[bytes]:
        parts, self._parts = self._parts, []
        self._drained.set()
        return parts

    async def _write(self, data: bytes, *, more: bool) -> None:
        async with asyncio.timeout(self._send_timeout_s):
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _wait_until_drained(self) -> None:
        self._drained.clear()
        await self._drained.wait()
        if self._broken:
            raise ClientGone
