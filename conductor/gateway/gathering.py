"""A transport that gathers what is written within one turn of the event loop and sends it at once.

uvicorn writes the head of an answer and its body apart, and uvloop sends each write by itself: two system calls, and two
wake-ups of the client, where one does. The events of a stream that become ready in the same turn share theirs too.
"""

from __future__ import annotations

import asyncio
from typing import Any

MAX_GATHERED_BYTES = 16 * 1024  # more goes out at once, so that a client that does not read is noticed within the turn


class GatheringTransport(asyncio.Transport):
    """Around the transport of one connection; everything but writing and ending is that transport's own."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._gathered_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(bytes(data))
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= MAX_GATHERED_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._parts:
            data = b"".join(self._parts)
            self._drop()
            self._transport.write(data)

    def _drop(self) -> None:
        self._parts.clear()
        self._gathered_bytes = 0

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._drop()
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + self._gathered_bytes

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._transport.get_protocol()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
