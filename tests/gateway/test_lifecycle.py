"""Clients that go away, gateways that are full or shut down, and what is left behind: nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable

import httpx
import pytest

from conductor.gateway.server import BindError, bind
from tests.doubles.scripted_engine import Script
from tests.gateway.conftest import MODEL, Live, StartGateway


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for something that another thread brings about."""
    deadline_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline_s, "did not come true within 10 s"
        time.sleep(0.01)


def raw_request(live: Live, *, stream: bool) -> socket.socket:
    """A connection on which a completion was asked for."""
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": stream}).encode()
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=10)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_tokens_come_cancels_once(live: Live, stream: bool) -> None:
    live.engine.script = Script(hold_after=2)
    connection = raw_request(live, stream=stream)
    eventually(lambda: len(live.engine.jobs) == 1)
    if stream:
        assert b"200 OK" in connection.recv(4096)
    connection.close()
    eventually(lambda: live.engine.cancelled != [])
    eventually(lambda: live.server.service.in_flight == 0)
    assert live.engine.cancelled == [live.engine.jobs[0].request.id]


def test_a_client_that_leaves_before_the_decision_cancels_once(live: Live) -> None:
    live.engine.script = Script(hold_submit=True)
    connection = raw_request(live, stream=True)
    eventually(lambda: len(live.engine.jobs) == 1)
    connection.close()
    eventually(lambda: live.engine.cancelled != [])
    assert live.engine.cancelled == [live.engine.jobs[0].request.id]


def test_a_finished_request_is_not_cancelled(live: Live) -> None:
    live.complete(stream=True)
    live.complete()
    eventually(lambda: live.server.service.in_flight == 0)
    assert live.engine.cancelled == []


def test_a_client_that_does_not_read_is_cancelled(start_gateway: StartGateway) -> None:
    """Its stream stops holding the cluster after the send timeout."""
    live = start_gateway(send_timeout_s=0.5)
    live.engine.script = Script(tokens=tuple(b"x" * 4000))
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
    body = json.dumps({**chat, "stream": True, "n": 8}).encode()  # more bytes than kernel buffers take
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", live.port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        eventually(lambda: live.engine.jobs != [] and live.server.service.in_flight == 0)
    cancelled = live.engine.cancelled
    assert cancelled
    assert len(set(cancelled)) == len(cancelled)


def test_a_body_that_trickles_is_408(start_gateway: StartGateway) -> None:
    live = start_gateway(body_timeout_s=0.2)
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert b"408" in connection.recv(4096)


def test_silence_is_filled_with_comments(start_gateway: StartGateway) -> None:
    """Proxies cut streams that are silent while a request waits for its first token."""
    live = start_gateway(keep_alive_comment_s=0.05)
    live.engine.script = Script(tokens=tuple(b"ab"), delay_s=0.3)
    assert ": keep-alive\n\n" in live.complete(stream=True).text


def test_a_full_gateway_refuses_before_any_work(start_gateway: StartGateway) -> None:
    live = start_gateway(max_in_flight=1, max_waiting=0)
    live.engine.script = Script(hold_after=0)
    connection = raw_request(live, stream=True)
    eventually(lambda: len(live.engine.jobs) == 1)
    answer = live.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "gateway_full")
    assert "retry-after" in answer.headers
    connection.close()
    eventually(lambda: live.server.service.in_flight == 0)
    live.engine.script = Script()
    assert live.complete().status_code == 200


def test_a_drain_finishes_streams_and_refuses_others(start_gateway: StartGateway) -> None:
    """Then the server ends by itself."""
    live = start_gateway()
    live.engine.script = Script(tokens=tuple(b"abcdef"), delay_s=0.15)
    answers: list[httpx.Response] = []
    reader = threading.Thread(target=lambda: answers.append(httpx.post(f"{live.url}/v1/completions", json=BODY, timeout=20)))
    reader.start()
    eventually(lambda: len(live.engine.jobs) == 1)
    live.server.begin_drain()
    refused = live.complete()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert live.client.get("/ready").status_code == 503
    assert live.client.get("/health").status_code == 200
    reader.join()
    assert answers[0].text.endswith("data: [DONE]\n\n")
    eventually(lambda: live.server.should_exit)
    assert live.engine.cancelled == []


BODY = {"model": MODEL, "prompt": "x", "stream": True}


def test_a_taken_port_is_one_clear_line(live: Live) -> None:
    with pytest.raises(BindError, match=rf"cannot serve on 127\.0\.0\.1:{live.port}: the port is taken"):
        bind("127.0.0.1", live.port)


def test_a_foreign_address_is_one_clear_line() -> None:
    with pytest.raises(BindError, match="cannot serve on"):
        bind("203.0.113.1", 0)
    with pytest.raises(BindError, match="host"):
        bind("no such host", 0)


def test_many_streams_at_once(live: Live) -> None:
    """500 concurrent streams all end, and none is left behind."""
    live.engine.script = Script(tokens=tuple(b"abcd"), delay_s=0.1)
    body = json.dumps(BODY).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def one() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer

    async def everyone() -> list[bytes]:
        return await asyncio.gather(*(one() for _ in range(500)))

    answers = asyncio.run(everyone())
    assert sum(b"data: [DONE]" in answer for answer in answers) == 500
    eventually(lambda: live.server.service.in_flight == 0)
    assert live.engine.cancelled == []
