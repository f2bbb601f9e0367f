"""HTTP/1.1 on one connection, with bounds that uvicorn does not have: how large a request's head may be, how long it may take
to arrive, how many connections there may be, and how long an answered client may take to fetch its answer.

The head is the request line and the headers. A client that never finishes its head (slow loris), does not begin one after
connecting, or leaves its answer in the socket's buffer is cut off. Errors of this layer have the OpenAI shape too.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from conductor.gateway.body import WHOLE_BODY
from conductor.gateway.errors import ApiError
from conductor.gateway.gathering import GatheringTransport
from conductor.gateway.settings import GatewaySettings

HEADER_OVERHEAD_BYTES = 4  # colon, space and line end


class BoundedProtocol(HttpToolsProtocol):
    """`bounded` binds the settings; uvicorn makes one object for each connection."""

    settings: GatewaySettings

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_open = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.settings.max_connections:
            transport.abort()
            return
        super().connection_made(GatheringTransport(transport, self.loop))
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        super().data_received(data)
        if self._head_open:
            self._count_unfinished_head(len(data))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_open = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        lines_bytes = sum(len(name) + len(value) + HEADER_OVERHEAD_BYTES for name, value in self.headers)
        self._head_open = False
        self._stop_head_timer()
        if len(self.url) + lines_bytes > self.settings.max_header_bytes:
            self._refusal = self._head_too_large()
            raise self._refusal  # the parser stops, and uvicorn asks for the answer to a request that cannot be read
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.scope[WHOLE_BODY] = True  # type: ignore[literal-required]
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or ApiError(400, "this is not HTTP/1.1", "invalid_http"))

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size() > 0:  # a close would wait for the client to read
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _count_unfinished_head(self, arrived_bytes: int) -> None:
        self._head_bytes += arrived_bytes
        if self._head_bytes > self.settings.max_header_bytes:
            self._refuse(self._head_too_large())
        elif self._head_timer is None:
            self._start_head_timer()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.settings.header_timeout_s, self._head_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        if self._head_open:
            limit_s = self.settings.header_timeout_s
            self._refuse(ApiError(408, f"the headers did not arrive within {limit_s:g} s", "header_timeout"))
        elif not self.transport.is_closing():
            self.transport.close()

    def _head_too_large(self) -> ApiError:
        limit = self.settings.max_header_bytes
        return ApiError(431, f"request line and headers are too large; allowed: {limit} bytes", "headers_too_large")

    def _refuse(self, problem: ApiError) -> None:
        """Answer without the application, and close. A request that is being answered is cut off instead."""
        self._stop_head_timer()
        self._head_open = False
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = problem.body()
        lines = [STATUS_LINE[problem.status], b"content-type: application/json\r\nconnection: close\r\n"]
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        self.transport.write(b"".join([*lines, body]))
        self.transport.close()


def bounded(settings: GatewaySettings) -> type[asyncio.Protocol]:
    """The protocol class with these bounds, as uvicorn wants it."""
    return type("ConfiguredProtocol", (BoundedProtocol,), {"settings": settings})
