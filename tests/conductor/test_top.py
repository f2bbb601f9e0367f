"""`conductor top`: a terminal's view of a gateway that runs, of one that goes away, and of one that is not there."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from conductor import top
from conductor.cli import app
from conductor.gateway.keys import key_hash, new_key
from tests.bench.served import free_port
from tests.doubles.pictures import Picture, picture
from tests.gateway.conftest import Live, running_gateway
from tests.gateway.test_access import A_KEY, entry, write_keys


@pytest.fixture(scope="module")
def seen() -> Picture:
    return picture()


@pytest.fixture
def live(seen: Picture) -> Iterator[Live]:
    with running_gateway(dashboard_period_s=0.05) as started:
        started.engine.ready, started.engine.picture = seen.status, seen.overview
        yield started


def conductor(*arguments: str, **environment: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments, env=environment)
    return result.exit_code, result.stdout, result.stderr


def test_one_picture_names_workers_decisions_and_prefixes(live: Live, seen: Picture) -> None:
    code, shown, _ = conductor("top", "--url", live.url, "--once")
    assert code == 0
    overview = seen.overview
    for words in (*overview["workers"], "ready", overview["decisions"][0]["request_id"], overview["hot_prefixes"][0]["prefix"]):
        assert words in shown
    assert "900 ms" in shown
    assert max(map(len, shown.splitlines())) <= 160


def test_json_is_what_the_gateway_sent(live: Live, seen: Picture) -> None:
    code, shown, _ = conductor("top", "--url", live.url, "--json")
    assert (code, json.loads(shown)["overview"]) == (0, json.loads(json.dumps(seen.overview)))


def test_nobody_there_is_one_line_and_exit_code_3() -> None:
    code, shown, problem = conductor("top", "--url", f"http://127.0.0.1:{free_port()}")
    assert (code, shown.strip(), len(problem.strip().splitlines())) == (3, "", 1)


def test_with_keys_the_admin_port_and_the_operator_s_key_open_it(tmp_path: Path, seen: Picture) -> None:
    """The key comes from the environment, where no process list shows it."""
    key = new_key()
    file = write_keys(tmp_path / "keys.yaml", a=entry(A_KEY))
    with running_gateway(keys_file=file, admin_port=0, admin_key=key_hash(key)) as keyed:
        keyed.engine.picture = seen.overview
        admin = f"http://127.0.0.1:{keyed.admin_port}"
        assert conductor("top", "--url", keyed.url, "--once")[0] == 1
        code, _, problem = conductor("top", "--url", admin, "--once")
        assert (code, "operator's key" in problem) == (1, True)
        assert conductor("top", "--url", admin, "--once", CONDUCTOR_OPERATOR_KEY=key)[0] == 0


class StopWatching(Exception):
    """Ends a watch that goes on until its user stops it."""


def test_a_lost_stream_is_told_and_opened_again(seen: Picture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway goes away and comes back on its port."""
    console = Console(file=io.StringIO(), width=140)
    drawn, lost, stop = threading.Event(), threading.Event(), threading.Event()
    render = top.render

    def counted(picture: top.Picture, before: top.Picture | None) -> RenderableType:
        if stop.is_set():
            raise StopWatching
        (drawn if before is not None else lost).set()
        return render(picture, before)

    def watch() -> None:
        with suppress(StopWatching):
            top.watch(f"http://127.0.0.1:{port}", None, console)

    monkeypatch.setattr(top, "render", counted)
    monkeypatch.setattr(top, "RETRY_S", 0.05)
    port = free_port()
    with running_gateway(port=port, dashboard_period_s=0.05) as first:
        first.engine.picture = seen.overview
        thread = threading.Thread(target=watch)
        thread.start()
        assert drawn.wait(10)
        lost.clear()  # the very first picture has none before it either
    assert lost.wait(10)
    drawn.clear()
    with running_gateway(port=port, dashboard_period_s=0.05):
        assert drawn.wait(10)
        stop.set()
        thread.join(10)
    assert not thread.is_alive()


def test_rates_come_from_two_pictures(seen: Picture) -> None:
    def after(output_tokens: float) -> dict[str, object]:
        gateway = {"in_flight": 1, "waiting_for_turn": 0, "waiting_for_first_token": 0, "rejections": {"quota_tokens": 3}}
        return {
            "ready": False,
            "reason": "no prefill worker",
            "model": "m",
            "period_s": 2.0,
            "workers": {},
            "overview": None,
            "gateway": gateway | {"output_tokens": output_tokens},
        }

    console = Console(file=io.StringIO(), width=140)
    with console.capture() as captured:
        console.print(top.render(after(500.0), after(100.0)))
    shown = captured.get()
    assert "200 tokens/s" in shown
    assert "not ready: no prefill worker" in shown
    assert "quota_tokens" in shown
