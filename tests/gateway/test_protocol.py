"""Connections that are meant to hurt: heads that are too large or never end, silence, and answers that nobody fetches."""

from __future__ import annotations

import json
import socket
import time

import pytest

from tests.doubles.scripted_engine import Script
from tests.gateway.conftest import MODEL, Live, StartGateway
from tests.gateway.test_lifecycle import eventually

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


def connect(live: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=10)


def read_all(connection: socket.socket) -> bytes:
    """Until the gateway closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """One answer on a connection that stays open; `end` is how its body ends."""
    answer = b""
    while not answer.endswith(end):
        part = connection.recv(65536)
        assert part, f"closed after {answer!r}"
        answer += part
    return answer


def refused_with(answer: bytes, status: int, code: str) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    return head.startswith(b"HTTP/1.1 %d " % status) and error["code"] == code and b"connection: close" in head


@pytest.mark.parametrize(
    "extra",
    [
        b"x-long: " + b"a" * 40_000 + b"\r\n\r\n",
        b"".join(b"x-%d: y\r\n" % number for number in range(5000)) + b"\r\n",
        b"x-never-ends: " + b"a" * 40_000,
        b"x" * 40_000,
    ],
    ids=["one long", "many", "unfinished value", "unfinished name"],
)
def test_a_head_that_is_too_large_is_431(live: Live, extra: bytes) -> None:
    with connect(live) as connection:
        connection.sendall(HEAD + extra)
        assert refused_with(read_all(connection), 431, "headers_too_large")
    assert live.engine.jobs == []


def test_a_long_request_line_counts_as_head(live: Live) -> None:
    with connect(live) as connection:
        connection.sendall(b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert refused_with(read_all(connection), 431, "headers_too_large")


def test_a_large_body_behind_a_small_head_is_no_large_head(live: Live) -> None:
    assert live.complete("x" * 3000, max_tokens=1).status_code == 200


def test_a_head_that_trickles_is_408(start_gateway: StartGateway) -> None:
    """Slow loris: one header a while keeps no connection."""
    live = start_gateway(header_timeout_s=0.3)
    with connect(live) as connection:
        connection.sendall(HEAD)
        for number in range(3):
            connection.sendall(b"x-%d: y\r\n" % number)
            time.sleep(0.05)
        assert refused_with(read_all(connection), 408, "header_timeout")


def test_a_second_head_that_trickles_is_408_too(start_gateway: StartGateway) -> None:
    """A good first request buys no time for a bad second one."""
    live = start_gateway(header_timeout_s=0.3)
    with connect(live) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        read_until(connection, b'{"status":"ok"}')
        connection.sendall(HEAD)
        assert refused_with(read_all(connection), 408, "header_timeout")


def test_a_connection_without_a_request_is_closed(start_gateway: StartGateway) -> None:
    live = start_gateway(header_timeout_s=0.2)
    with connect(live) as connection:
        assert read_all(connection) == b""


def test_a_head_in_pieces_is_read(start_gateway: StartGateway) -> None:
    live = start_gateway(header_timeout_s=5)
    with connect(live) as connection:
        for piece in (b"GET /hea", b"lth HTTP/1.1\r\nho", b"st: x\r\nconnection: close\r\n", b"\r\n"):
            connection.sendall(piece)
            time.sleep(0.02)
        assert b'{"status":"ok"}' in read_all(connection)


def test_a_long_answer_outlives_the_head_timeout(start_gateway: StartGateway) -> None:
    live = start_gateway(header_timeout_s=0.2)
    live.engine.script = Script(tokens=tuple(b"abcd"), delay_s=0.1)
    assert live.complete().json()["choices"][0]["text"] == "abcd"


@pytest.mark.parametrize("raw", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello\r\n\r\n", b"\x00" * 100])
def test_what_is_no_http_is_400(live: Live, raw: bytes) -> None:
    """A TLS client on the plain port among them."""
    with connect(live) as connection:
        connection.sendall(raw)
        assert refused_with(read_all(connection), 400, "invalid_http")


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"content-length: -1\r\n",
        b"transfer-encoding: chunked, identity\r\n",
    ],
)
def test_a_body_whose_length_two_readers_might_read_differently_is_400(live: Live, head: bytes) -> None:
    """Request smuggling."""
    with connect(live) as connection:
        connection.sendall(HEAD + head + b"\r\n12345")
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    assert live.engine.jobs == []


def test_more_connections_than_allowed_are_closed_at_once(start_gateway: StartGateway) -> None:
    live = start_gateway(max_connections=2)
    live.client.get("/health")
    with connect(live), connect(live) as third:
        assert read_all(third) == b""
    eventually(lambda: live.client.get("/health").status_code == 200)


def test_no_such_model_is_refused_on_a_kept_connection(live: Live) -> None:
    """An error of the application closes nothing."""
    body = json.dumps({"model": "no", "prompt": "x"}).encode()
    good = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    with connect(live) as connection:
        for content, status in ((body, b"400"), (good, b"200")):
            connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(content) + content)
            assert read_until(connection, b"}").split()[1] == status
