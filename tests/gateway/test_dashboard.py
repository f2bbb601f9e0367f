"""The dashboard's page and events over HTTP: who gets them, what they carry, and what watching costs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from conductor.gateway.keys import key_hash, new_key
from tests.doubles.scripted_engine import Script
from tests.gateway.conftest import MODEL, Live, StartGateway
from tests.gateway.test_access import A_KEY, entry, write_keys
from tests.gateway.test_lifecycle import eventually

ADMIN_KEY = new_key()
OPERATOR = {"authorization": f"Bearer {ADMIN_KEY}"}
EVENTS = "/dashboard/events"


def pictures(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line:
            assert line.startswith("data: ")
            yield json.loads(line.removeprefix("data: "))


def first_picture(live: Live) -> dict[str, Any]:
    with live.client.stream("GET", EVENTS) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        return next(pictures(answer))


def test_the_page_is_whole_and_allows_nothing_from_elsewhere(live: Live) -> None:
    """Style and script are inside, no address is named, and the policy names exactly these two."""
    answer = live.client.get("/dashboard")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    text = answer.text.replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?:|src=|@import|url\(", text) == []
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, flags=re.S)
        assert len(inside) > 1000
        assert base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode() in policy
    assert answer.headers["x-frame-options"] == "DENY"


def test_a_picture_has_gateway_cluster_and_decisions(start_gateway: StartGateway) -> None:
    live = start_gateway(dashboard_period_s=0.05)
    live.engine.picture = {"decisions": [{"request_id": "r"}]}
    live.complete()
    seen = first_picture(live)
    assert (seen["ready"], seen["model"], seen["workers"]["p0"]["queued_requests"]) == (True, MODEL, 3)
    assert seen["overview"] == {"decisions": [{"request_id": "r"}]}
    assert (seen["gateway"]["output_tokens"], seen["gateway"]["in_flight"]) == (5, 0)
    assert seen["gateway"]["answers"] == {"200": 2}  # the stream itself is the second


def test_refusals_are_counted_by_reason(start_gateway: StartGateway) -> None:
    live = start_gateway(max_in_flight=1, max_waiting=0)
    live.engine.script = Script(hold_after=0)
    with live.client.stream("POST", "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}):
        eventually(lambda: len(live.engine.jobs) == 1)
        live.complete()
        assert first_picture(live)["gateway"]["rejections"] == {"gateway_full": 1}


def test_a_cluster_that_does_not_answer_is_told(start_gateway: StartGateway) -> None:
    live = start_gateway()
    live.engine.ready = live.engine.picture = ConnectionError()
    seen = first_picture(live)
    assert (seen["ready"], seen["reason"], seen["workers"], seen["overview"]) == (
        False,
        "the cluster does not answer",
        {},
        None,
    )


def test_pictures_keep_coming(start_gateway: StartGateway) -> None:
    live = start_gateway(dashboard_period_s=0.05)
    with live.client.stream("GET", EVENTS) as answer:
        stream = pictures(answer)
        assert [next(stream)["ready"] for _ in range(3)] == [True] * 3


def test_many_who_watch_cost_no_more_than_one(start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five open streams of a slow period share one picture."""
    live = start_gateway(dashboard_period_s=60)
    asked: list[int] = []
    overview = live.engine.overview

    async def counted() -> Any:
        asked.append(1)
        return await overview()

    monkeypatch.setattr(live.engine, "overview", counted)
    with ExitStack() as stack:
        for _ in range(5):
            next(pictures(stack.enter_context(live.client.stream("GET", EVENTS))))
    assert len(asked) == 1


def test_who_watches_does_not_hold_up_the_end(start_gateway: StartGateway) -> None:
    """The stream is ended, not cut, when the server has drained."""
    live = start_gateway(dashboard_period_s=60)
    done = threading.Event()

    def watch() -> None:
        with httpx.stream("GET", f"{live.url}{EVENTS}", timeout=30) as answer:
            for _ in answer.iter_lines():
                done.set()
        finished.set()

    finished = threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    assert done.wait(10)
    live.server.begin_drain()
    thread.join(10)
    assert finished.is_set()


@pytest.fixture
def keyed(start_gateway: StartGateway, tmp_path: Path) -> Live:
    file = write_keys(tmp_path / "keys.yaml", a=entry(A_KEY))
    return start_gateway(keys_file=file, admin_port=0, admin_key=key_hash(ADMIN_KEY))


@pytest.mark.parametrize("path", ["/dashboard", EVENTS])
def test_where_keys_are_asked_for_the_public_port_has_no_dashboard(keyed: Live, path: str) -> None:
    """Not even for a tenant: it shows the requests of all of them."""
    assert keyed.client.get(path).status_code == 401
    assert keyed.client.get(path, headers={"authorization": f"Bearer {A_KEY}"}).status_code == 404
    assert keyed.client.get(path, headers=OPERATOR).status_code == 401


def test_on_the_admin_port_the_page_is_open_and_the_events_are_the_operator_s(keyed: Live) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{keyed.admin_port}", timeout=20) as admin:
        assert admin.get("/dashboard").status_code == 200
        for headers in ({}, {"authorization": f"Bearer {A_KEY}"}):
            assert admin.get(EVENTS, headers=headers).status_code == 401
        for path in ("/dashboard/", "/dashboard/../admin/tenants", "/dashboard%2f..%2fadmin/tenants"):
            request = httpx.Request("GET", admin.base_url)
            request.url = httpx.URL(str(admin.base_url), raw_path=path.encode())
            assert admin.send(request).status_code == 401
        with admin.stream("GET", EVENTS, headers=OPERATOR) as answer:
            assert next(pictures(answer))["ready"]
