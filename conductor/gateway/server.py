"""Runs the gateway on its sockets with uvicorn and uvloop: bound before anything else starts, drained before it ends.

The first SIGTERM or SIGINT makes the gateway refuse new generations (503) while those in flight go on; when they are done, or
after `drain_timeout_s`, the server closes. A second signal ends it at once. The admin endpoints are a server of their own on
the same event loop, and both speak TLS when there are certificate files.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from conductor.gateway.admin import admin_app
from conductor.gateway.protocol import bounded
from conductor.gateway.service import Service
from conductor.gateway.settings import GatewaySettings
from conductor.gateway.tls import Certificates, certificates

logger = logging.getLogger(__name__)
BACKLOG = 2048
COLLECT_AFTER_OBJECTS = 20_000


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


def bind_admin(settings: GatewaySettings) -> socket.socket | None:
    """A listening socket for the admin endpoints, None while they stay closed; raises `BindError`."""
    return None if settings.admin_port is None else bind(settings.admin_host, settings.admin_port)


class AdminServer(uvicorn.Server):
    """Lives and ends with the gateway's server, which has the signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server(uvicorn.Server):
    """uvicorn, with a drain between the signal and the end, and the admin endpoints beside it."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        *,
        admin: socket.socket | None = None,
        certificates: Certificates | None = None,
        own_signals: bool = True,
    ) -> None:
        """Without `own_signals` somebody else calls `handle_exit`."""
        super().__init__(config)
        self.service = service
        self._admin = admin
        self._certificates = certificates
        self._own_signals = own_signals
        self._drain_until_s: float | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if self._own_signals:
            with super().capture_signals():
                yield
        else:
            yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        period_s = self.service.settings.files_check_s
        beside: list[Coroutine[Any, Any, None]] = [self.service.access.follow_file(period_s)]
        if self._certificates is not None:
            beside.append(self._certificates.follow_files(period_s))
        async with self._admin_beside():
            tasks = [asyncio.ensure_future(work) for work in beside]
            try:
                await super().serve(sockets)
            finally:
                for task in tasks:
                    task.cancel()

    @asynccontextmanager
    async def _admin_beside(self) -> AsyncIterator[None]:
        key = self.service.settings.admin_key
        if self._admin is None or key is None:
            yield
            return
        app = admin_app(self.service, key, self.begin_drain)
        server = AdminServer(server_config(app, self.service.settings, self._certificates))
        task = asyncio.ensure_future(server.serve([self._admin]))
        try:
            yield
        finally:
            server.should_exit = True
            await task

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain_until_s is not None:
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)
        self.begin_drain()

    def begin_drain(self) -> None:
        """Safe to call again: the first call's time counts."""
        if self._drain_until_s is None:
            self.service.drain()
            self._drain_until_s = monotonic() + self.service.settings.drain_timeout_s
            logger.info("draining: %d generations in flight", self.service.in_flight)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.ended.set()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if self._drain_until_s is not None and (self.service.in_flight == 0 or monotonic() >= self._drain_until_s):
            self.should_exit = True
        return await super().on_tick(counter)


def server_config(app: ASGIApp, settings: GatewaySettings, certificates: Certificates | None) -> uvicorn.Config:
    factory = None if certificates is None else lambda *_: certificates.context
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=bounded(settings),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        ssl_context_factory=factory,
    )


def make_server(app: FastAPI, *, admin: socket.socket | None = None, own_signals: bool = True) -> Server:
    """A server for an app of `create_app`; `await server.serve(sockets=[bind(...)])` runs it. Raises `TlsError`."""
    service: Service = app.state.service
    tls = certificates(service.settings)
    config = server_config(app, service.settings, tls)
    return Server(config, service, admin=admin, certificates=tls, own_signals=own_signals)


def spare_the_collector() -> None:
    """For a process that is about to serve and does nothing else: what is there by now stays, and looking through it again and
    again would pause every stream. Requests leave few cycles, so what comes later need not be looked through often either."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_OBJECTS)


def run(app: FastAPI) -> None:
    """Serve until a signal; raises `BindError` and `TlsError` before anything is started."""
    settings: GatewaySettings = app.state.service.settings
    with bind(settings.host, settings.port) as listener:
        server = make_server(app, admin=bind_admin(settings))
        spare_the_collector()
        server.run(sockets=[listener])
