"""Too much at once, and a gateway process that is told to go: refusals are cheap, say when to come back, and lose nothing."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conductor.core.types import FinishReason, RejectReason
from tests.doubles.scripted_engine import Script
from tests.gateway.conftest import Live, StartGateway
from tests.gateway.test_lifecycle import eventually, raw_request

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "script",
    [
        *(Script(rejection=reason) for reason in RejectReason if reason is not RejectReason.TOO_LONG),
        Script(raises=ConnectionError()),
        Script(tokens=(), finish=FinishReason.FAILED),
        Script(tokens=()),
    ],
    ids=lambda script: script.rejection or script.finish.value,
)
def test_every_refusal_for_lack_of_capacity_says_when_to_come_back(live: Live, script: Script) -> None:
    live.engine.script = script
    answer = live.complete()
    assert answer.status_code in (429, 503)
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"]


def test_a_refusal_by_a_full_gateway_costs_no_tokenizing(start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the body is looked at: a broken one is refused for the same reason."""
    live = start_gateway(max_in_flight=1, max_waiting=0)
    live.engine.script = Script(hold_after=0)
    connection = raw_request(live, stream=True)
    eventually(lambda: len(live.engine.jobs) == 1)

    def tokenized(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(live.server.service.served.tokenizer, "encode", tokenized)
    assert live.complete("x").status_code == 429
    assert live.client.post("/v1/completions", content=b"{").json()["error"]["code"] == "gateway_full"
    connection.close()
    eventually(lambda: live.server.service.in_flight == 0)


def test_a_burst_beyond_the_places_waits_and_is_answered(start_gateway: StartGateway) -> None:
    """Ten requests, two places, room for eight: all are answered, two at a time."""
    live = start_gateway(max_in_flight=2, max_waiting=8)
    live.engine.script = Script(tokens=tuple(b"ab"), delay_s=0.02)
    connections = [raw_request(live, stream=False) for _ in range(10)]
    answers = [connection.recv(4096) for connection in connections]
    assert [answer.split()[1] for answer in answers] == [b"200"] * 10
    for connection in connections:
        connection.close()
    eventually(lambda: live.server.service.in_flight == 0)
    assert len(live.server.service.room) == 0


def test_who_leaves_the_waiting_room_is_never_submitted(start_gateway: StartGateway) -> None:
    live = start_gateway(max_in_flight=1)
    live.engine.script = Script(hold_after=0)
    first = raw_request(live, stream=True)
    eventually(lambda: len(live.engine.jobs) == 1)
    second = raw_request(live, stream=True)
    eventually(lambda: len(live.server.service.room) == 1)
    second.close()
    eventually(lambda: len(live.server.service.room) == 0)
    first.close()
    eventually(lambda: live.server.service.in_flight == 0)
    assert len(live.engine.jobs) == 1
    assert live.engine.cancelled == [live.engine.jobs[0].request.id]


@contextmanager
def gateway_process(tokens: int, tbt_s: float) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A gateway over an engine that answers by itself, in a process that takes signals."""
    command = [sys.executable, "-m", "tests.bench.null_gateway", str(tokens), str(tbt_s)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}
    ) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def ask(port: int) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = {"model": "null", "prompt": "x", "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"connection": "close"})
    return connection.getresponse()


def test_sigterm_finishes_streams_refuses_others_and_ends() -> None:
    """The stream that runs when the signal comes is whole; the process ends by itself."""
    with gateway_process(tokens=30, tbt_s=0.05) as (process, port):
        stream = ask(port)
        first = stream.readline()
        process.send_signal(signal.SIGTERM)

        def refused() -> bool:
            answer = ask(port)
            answer.read()
            return answer.status == 503 and answer.headers["retry-after"] is not None

        eventually(refused)
        rest = stream.read()
        assert (first + rest).count(b'"text": "a"') == 30
        assert rest.endswith(b"data: [DONE]\n\n")
        assert process.wait(timeout=20) in (0, -signal.SIGTERM)
