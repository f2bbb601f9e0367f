"""A live gateway for each test: real sockets, a scripted engine behind."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from conductor.gateway import GatewaySettings, ServedModel, create_app
from conductor.gateway.server import Server, bind, bind_admin, make_server
from conductor.gateway.tracing import Tracing
from tests.doubles.byte_tokenizer import ByteTokenizer
from tests.doubles.scripted_engine import ScriptedEngine

MODEL = "test-model"
CONTEXT = 4096
BLOCK_BYTES = 64 * 4


def hash_prompt(tokens: bytes, tenant: str) -> tuple[int, ...]:
    """Chained in the simplest way: the digest of the whole prefix."""
    ends = range(BLOCK_BYTES, len(tokens) + 1, BLOCK_BYTES)
    return tuple(int.from_bytes(hashlib.sha256(tenant.encode() + tokens[:end]).digest()[:16], "big") for end in ends)


def served_model() -> ServedModel:
    return ServedModel((MODEL, "alias"), CONTEXT, ByteTokenizer(), hash_prompt, created_s=1_700_000_000)


@dataclass
class Live:
    """A running gateway."""

    engine: ScriptedEngine
    server: Server
    url: str
    port: int
    admin_port: int | None
    client: httpx.Client = field(repr=False)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers={name.replace("_", "-"): value for name, value in headers.items()})

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields})


StartGateway = Callable[..., Live]


@contextmanager
def running_gateway(tracing: Tracing | None = None, *, port: int = 0, **settings: Any) -> Iterator[Live]:
    """A gateway in a thread of its own."""
    engine = ScriptedEngine()
    checked = GatewaySettings(**settings)
    app = create_app(engine, served_model(), checked, tracing)
    listener, admin = bind("127.0.0.1", port), bind_admin(checked)
    port, admin_port = listener.getsockname()[1], admin and admin.getsockname()[1]
    server = make_server(app, admin=admin)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield Live(engine, server, f"http://127.0.0.1:{port}", port, admin_port, client)
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        for opened in filter(None, (listener, admin)):
            opened.close()
        assert not thread.is_alive()


@pytest.fixture
def start_gateway() -> Iterator[StartGateway]:
    """Starts gateways with given settings; stops them after the test."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(running_gateway(**settings))


@pytest.fixture(scope="session")
def shared_gateway() -> Iterator[Live]:
    with running_gateway() as live:
        yield live


@pytest.fixture
def live(shared_gateway: Live) -> Live:
    """A gateway with default settings and a fresh script; only its metrics remember other tests."""
    shared_gateway.engine.reset()
    return shared_gateway
