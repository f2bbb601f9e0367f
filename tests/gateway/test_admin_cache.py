"""`conductor cache` and the admin endpoints behind it: on a running gateway, and on a directory that nobody has open."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from conductor.cli import app
from conductor.gateway.keys import key_hash, new_key
from tests.gateway.conftest import Live, StartGateway
from tests.workers.kv_store.conftest import make_disk, make_shared
from tests.workers.kv_store.doubles import chain, damage, new_blocks
from tests.workers.kv_store.test_files_on_disk import flip_payload, payload_files, truncate

ADMIN_KEY = new_key()


@pytest.fixture
def live(start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch) -> Live:
    monkeypatch.setenv("CONDUCTOR_OPERATOR_KEY", ADMIN_KEY)
    return start_gateway(admin_port=0, admin_key=key_hash(ADMIN_KEY))


def cache(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cache", *arguments])


def rows(*arguments: str) -> list[dict[str, Any]]:
    done = cache(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


# --- a running gateway ------------------------------------------------------------------------------------------------


def test_every_worker_is_asked(live: Live) -> None:
    """What the operator asks for reaches the engine with the hash as a number."""
    url = f"http://127.0.0.1:{live.admin_port}"
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(base_url=url, headers=headers) as client:
        assert client.get("/admin/cache").json() == {"workers": {"p0": {"asked": "stats", "hash": None}}}
        assert client.get("/admin/cache/ls", params={"hash": "ff"}).json()["workers"]["p0"] == {"asked": "ls", "hash": 255}
        for action in ("pin", "unpin", "drop", "verify"):
            answer = client.post(f"/admin/cache/{action}", json={"hash": "1f"})
            assert answer.json()["workers"]["p0"] == {"asked": action, "hash": 31}
        assert client.post("/admin/cache/drop").json()["workers"]["p0"] == {"asked": "drop", "hash": None}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("pin", b"{}", 400), ("pin", b'{"hash": "no"}', 400), ("drop", b"[", 400), ("drop", b"[]", 400), ("burn", b"{}", 404)],
)
def test_what_is_not_understood_is_refused(live: Live, path: str, body: bytes, status: int) -> None:
    url = f"http://127.0.0.1:{live.admin_port}/admin/cache/{path}"
    answer = httpx.post(url, content=body, headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert answer.status_code == status
    assert "allowed" in answer.json()["error"]["message"]


def test_only_the_operator_may_ask(live: Live) -> None:
    assert httpx.get(f"http://127.0.0.1:{live.admin_port}/admin/cache").status_code == 401


def test_the_command_line_says_what_is_missing(live: Live, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{live.admin_port}"
    assert cache("stats").exit_code == 2
    assert cache("stats", "--url", url, "--directory", str(tmp_path)).exit_code == 2
    assert cache("stats", "--directory", str(tmp_path / "none")).exit_code == 2
    assert cache("pin", "zz", "--url", url).exit_code == 2
    assert cache("ls", "zz", "--directory", str(tmp_path)).exit_code == 2
    assert cache("verify", "ff", "--directory", str(tmp_path)).exit_code == 2
    assert cache("stats", "--url", "http://127.0.0.1:9").exit_code == 3
    monkeypatch.delenv("CONDUCTOR_OPERATOR_KEY")
    assert "CONDUCTOR_OPERATOR_KEY" in cache("stats", "--url", url).output


# --- a directory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_disk, make_shared])
def test_a_directory_is_read_as_it_lies_there(make: Callable[..., Any], tmp_path: Path) -> None:
    """Prefixes by their last block, the chain to one of them, totals, and pins, while a worker has the store open."""
    tier = make(tmp_path)
    tier.put(new_blocks(chain(0, 5), "agent"))
    tier.put(new_blocks(chain(1, 4)))
    tier.pin(chain(1, 4))
    where = ("--directory", str(tmp_path))
    listed = {row["hash"]: row for row in rows("ls", *where)}
    ends = [f"{chain(0, 5)[-1]:032x}", f"{chain(1, 4)[-1]:032x}"]
    assert set(listed) == set(ends)
    assert [(listed[end]["blocks"], listed[end]["class"], listed[end]["pinned"]) for end in ends] == [
        (5, "agent", False),
        (4, "chat", True),
    ]
    assert [row["hash"] for row in rows("ls", ends[0], *where)] == [f"{name:032x}" for name in chain(0, 5)]
    (total,) = rows("stats", *where)
    assert (total["blocks"], total["pinned"], total["damaged"]) == (7, 4, 0)
    assert rows("verify", *where) == []
    assert "agent" in cache("ls", *where).output
    tier.close()


@pytest.mark.parametrize(("change", "word"), [(flip_payload, "checksum"), (truncate, "truncated")])
@pytest.mark.parametrize("make", [make_disk, make_shared])
def test_damage_is_found_offline(
    make: Callable[..., Any], change: Callable[[bytearray], None], word: str, tmp_path: Path
) -> None:
    """The exit code says that something is wrong, the table what and where."""
    tier = make(tmp_path)
    tier.put(new_blocks(chain(0, 2)))
    tier.close()
    path = payload_files(tmp_path)[0]
    damage(path, change)
    done = cache("verify", "--directory", str(tmp_path), "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert [(row["damage"], row["path"]) for row in found] == [(word, str(path))]
