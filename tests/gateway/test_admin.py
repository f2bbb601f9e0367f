"""The operator's endpoints: on a port of their own, with a key of their own, and out of reach for everybody else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from conductor.gateway.keys import key_hash, new_key
from conductor.gateway.settings import GatewaySettings
from tests.doubles.scripted_engine import Script
from tests.gateway.conftest import Live, StartGateway
from tests.gateway.test_access import A_KEY, B_KEY, ask, entry, write_keys
from tests.gateway.test_errors import error_of
from tests.gateway.test_lifecycle import eventually, raw_request

ADMIN_KEY = new_key()
OPERATOR = {"authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture
def live(start_gateway: StartGateway, tmp_path: Path) -> Live:
    """A gateway with two tenants and open admin endpoints."""
    file = write_keys(tmp_path / "keys.yaml", a=entry(A_KEY, tokens_per_s=10, max_in_flight=3), b=entry(B_KEY))
    return start_gateway(keys_file=file, admin_port=0, admin_key=key_hash(ADMIN_KEY), files_check_s=3600)


@pytest.fixture
def admin(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{live.admin_port}", timeout=20) as client:
        yield client


def test_tenants_are_told_with_limits_and_use(live: Live, admin: httpx.Client) -> None:
    ask(live, A_KEY)
    eventually(lambda: live.server.service.in_flight == 0)
    answer = admin.get("/admin/tenants", headers=OPERATOR)
    first, second = answer.json()["tenants"]
    assert (first["name"], first["max_in_flight"], first["in_flight"], first["burst_tokens"]) == ("a", 3, 0, 600)
    assert 592 <= first["left_tokens"] < 600  # 3 tokens of prompt and 5 of answer
    assert (second["name"], second["left_tokens"], second["keys"]) == ("b", None, 1)
    assert "sha256" not in answer.text


def test_a_reload_takes_effect_at_once(live: Live, admin: httpx.Client) -> None:
    file = live.server.service.settings.keys_file
    assert file is not None
    write_keys(file, b=entry(B_KEY))
    assert ask(live, A_KEY).status_code == 200
    assert admin.post("/admin/reload", headers=OPERATOR).json() == {"tenants": 1, "keys": 1}
    assert ask(live, A_KEY).status_code == 401


def test_a_file_that_cannot_be_used_is_400_and_changes_nothing(live: Live, admin: httpx.Client) -> None:
    file = live.server.service.settings.keys_file
    assert file is not None
    file.write_text("tenants: {a: {keys: []}}")
    error = error_of(admin.post("/admin/reload", headers=OPERATOR), 400)
    assert error["code"] == "keys_file_refused"
    assert "tenants.a.keys" in error["message"]
    assert ask(live, A_KEY).status_code == 200


def test_a_drain_finishes_what_runs_and_ends_the_server(live: Live, admin: httpx.Client) -> None:
    live.engine.script = Script(tokens=tuple(b"abcd"), delay_s=0.1)
    headers = {"authorization": f"Bearer {A_KEY}"}
    body = {"model": "test-model", "prompt": "x", "stream": True}
    with live.client.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        answer = admin.post("/admin/drain", headers=OPERATOR)
        assert (answer.status_code, answer.json()) == (202, {"status": "draining", "in_flight": 1})
        assert ask(live, B_KEY).json()["error"]["code"] == "draining"
        assert stream.read().endswith(b"data: [DONE]\n\n")
    eventually(lambda: live.server.should_exit)


@pytest.mark.parametrize("key", [None, A_KEY, new_key(), key_hash(ADMIN_KEY)], ids=["none", "tenant", "unknown", "hash"])
@pytest.mark.parametrize("path", ["/admin/drain", "/admin/reload", "/nowhere"])
def test_only_the_operator_s_key_opens(live: Live, admin: httpx.Client, key: str | None, path: str) -> None:
    """A tenant's key does not, and unknown paths are not told apart from known ones."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    assert admin.post(path, headers=headers).status_code == 401
    assert not live.server.service.draining


TRICKS = [
    b"/admin/drain",
    b"//admin/drain",
    b"/./admin/drain",
    b"/health/../admin/drain",
    b"/health/..%2fadmin/drain",
    b"/%61dmin/drain",
    b"/admin%2fdrain",
    b"/admin/drain/",
    b"/admin/drain?x=/health",
    b"/admin/drain;a=b",
    b"/ADMIN/DRAIN",
    b"http://127.0.0.1/admin/drain",
]


def raw_status(port: int, target: bytes, *headers: bytes) -> bytes:
    """The status line of a POST whose target no client library has tidied up."""
    lines = [b"POST " + target + b" HTTP/1.1", b"host: x", b"content-length: 0", b"connection: close", *headers, b"", b""]
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"\r\n".join(lines))
        return connection.recv(4096).split(b"\r\n", 1)[0]


@pytest.mark.parametrize("target", TRICKS)
def test_no_path_leads_from_the_public_port_to_the_admin_endpoints(live: Live, target: bytes) -> None:
    """With a tenant's key, with the operator's, and with none."""
    bearer = b"authorization: Bearer "
    with_keys = [(), (bearer + A_KEY.encode(),), (bearer + ADMIN_KEY.encode(),)]
    statuses = [raw_status(live.port, target, *headers).split()[1] for headers in with_keys]
    assert set(statuses) <= {b"401", b"404", b"400"}, statuses
    assert not live.server.service.draining


@pytest.mark.parametrize("target", TRICKS)
def test_no_path_goes_around_the_operator_s_key(live: Live, target: bytes) -> None:
    assert live.admin_port is not None
    for headers in ((), (b"x-original-url: /health",), (b"x-forwarded-for: 127.0.0.1",)):
        assert raw_status(live.admin_port, target, *headers).split()[1] in (b"401", b"400")
    assert not live.server.service.draining


def test_wrong_methods_and_paths_have_the_usual_shape(admin: httpx.Client) -> None:
    assert error_of(admin.get("/admin/drain", headers=OPERATOR), 405)["code"] == "method_not_allowed"
    assert error_of(admin.get("/admin", headers=OPERATOR), 404)["code"] == "unknown_route"


def test_without_a_port_there_are_no_admin_endpoints(start_gateway: StartGateway) -> None:
    assert start_gateway().admin_port is None


def test_a_port_without_a_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="admin_port is set and admin_key is not"):
        GatewaySettings(admin_port=0)


def test_waiting_requests_are_told(start_gateway: StartGateway) -> None:
    """And one that waits for its turn gets it when the other ends."""
    live = start_gateway(max_in_flight=1, admin_port=0, admin_key=key_hash(ADMIN_KEY))
    live.engine.script = Script(hold_after=0)
    first = raw_request(live, stream=True)
    eventually(lambda: len(live.engine.jobs) == 1)
    second = raw_request(live, stream=False)
    with httpx.Client(base_url=f"http://127.0.0.1:{live.admin_port}", timeout=20) as admin:

        def waiting() -> int:
            return int(admin.get("/admin/tenants", headers=OPERATOR).json()["tenants"][0]["waiting"])

        eventually(lambda: waiting() == 1)
        assert len(live.engine.jobs) == 1
        live.engine.script = Script()
        first.close()
        assert b"200 OK" in second.recv(4096)
    second.close()
    eventually(lambda: live.server.service.in_flight == 0)
