"""Runs the gateway on a socket: uvicorn with uvloop and httptools, bound before anything else starts, drained before it stops.

The first SIGTERM or SIGINT makes the gateway refuse new generations (503) while those in flight go on; when they are done, or
after `drain_timeout_s`, the server closes. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from time import monotonic
from types import FrameType

import uvicorn
from fastapi import FastAPI

from conductor.gateway.service import Service
from conductor.gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)
BACKLOG = 2048


class BindError(Exception):
    """The address cannot be served on; the message is one line for people."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises `BindError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as problem:
        raise BindError(f"cannot serve on host {host!r}: {problem.strerror}; allowed: an address of this machine") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as problem:
        listener.close()
        taken = problem.errno == errno.EADDRINUSE
        reason = "the port is taken; choose another one or stop its owner" if taken else problem.strerror
        raise BindError(f"cannot serve on {host}:{port}: {reason}") from None
    return listener


class Server(uvicorn.Server):
    """uvicorn, with a drain between the signal and the end."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self._drain_until_s: float | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        settings = self.service.settings
        follower = asyncio.ensure_future(self.service.access.follow_file(settings.keys_check_s))
        try:
            await super().serve(sockets)
        finally:
            follower.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain_until_s is not None:
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)
        self.begin_drain()

    def begin_drain(self) -> None:
        self.service.drain()
        self._drain_until_s = monotonic() + self.service.settings.drain_timeout_s
        logger.info("draining: %d generations in flight", self.service.in_flight)

    async def on_tick(self, counter: int) -> bool:
        if self._drain_until_s is not None and (self.service.in_flight == 0 or monotonic() >= self._drain_until_s):
            self.should_exit = True
        return await super().on_tick(counter)


def make_server(app: FastAPI) -> Server:
    """A server for an app of `create_app`; `await server.serve(sockets=[bind(...)])` runs it."""
    service: Service = app.state.service
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    return Server(config, service)


def run(app: FastAPI) -> None:
    """Serve until a signal; raises `BindError` before anything is started."""
    settings: GatewaySettings = app.state.service.settings
    listener = bind(settings.host, settings.port)
    try:
        make_server(app).run(sockets=[listener])
    finally:
        listener.close()
