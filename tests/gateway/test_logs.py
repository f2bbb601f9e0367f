"""Log lines carry the request's id and nothing that a client wants kept."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from conductor.gateway.logs import LogFormat, current_request, handler_for
from tests.doubles.scripted_engine import Script
from tests.gateway.conftest import MODEL, Live
from tests.gateway.test_lifecycle import eventually


class Captured:
    """What the project's loggers write in one format."""

    def __init__(self, kind: LogFormat) -> None:
        self.stream = io.StringIO()
        self.handler = handler_for(kind, self.stream)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def captured(request: pytest.FixtureRequest) -> Iterator[Captured]:
    logger = logging.getLogger("conductor")
    found, before = Captured(request.param), logger.level
    logger.addHandler(found.handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(found.handler)
    logger.setLevel(before)


@pytest.mark.parametrize("captured", ["json"], indirect=True)
def test_an_answer_is_one_json_line_with_its_request_id(live: Live, captured: Captured) -> None:
    headers = {"x-request-id": "mine-1", "traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    live.client.post("/v1/completions", json={"model": MODEL, "prompt": "a secret prompt"}, headers=headers)
    eventually(lambda: captured.lines != [])
    line = json.loads(captured.lines[-1])
    assert (line["request_id"], line["message"], line["level"]) == ("mine-1", "answered", "info")
    assert (line["endpoint"], line["status"], line["tenant"]) == ("/v1/completions", 200, "default")
    assert line["trace_id"] == "1" * 32
    assert "secret" not in captured.stream.getvalue()


@pytest.mark.parametrize("captured", ["json"], indirect=True)
def test_a_fault_is_one_json_line_with_its_traceback(live: Live, captured: Captured) -> None:
    live.engine.script = Script(raises=RuntimeError("broken\nin two lines"))
    live.client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={"x-request-id": "mine-2"})
    eventually(lambda: len(captured.lines) == 2)
    fault = json.loads(captured.lines[0])
    assert (fault["level"], fault["request_id"]) == ("error", "mine-2")
    assert "RuntimeError" in fault["traceback"]


@pytest.mark.parametrize("captured", ["text"], indirect=True)
def test_text_lines_are_for_people(live: Live, captured: Captured) -> None:
    live.client.get("/health", headers={"x-request-id": "mine-3"})
    eventually(lambda: captured.lines != [])
    assert "status=200" in captured.lines[-1]
    assert captured.lines[-1].endswith("request_id=mine-3")


def test_lines_outside_of_a_request_have_no_id() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "started %s", ("now",), None)
    assert current_request.get() is None
    assert "request_id" not in json.loads(handler_for("json").format(record))
