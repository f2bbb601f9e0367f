"""Keys, tenants and quotas at the door of a live gateway."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from conductor.gateway.access import Access
from conductor.gateway.keys import KeysError, key_hash, new_key
from tests.doubles.scripted_engine import Script
from tests.gateway.conftest import MODEL, Live, StartGateway
from tests.gateway.test_errors import error_of
from tests.gateway.test_lifecycle import eventually

A_KEY, B_KEY, C_KEY = new_key(), new_key(), new_key()
BLOCK = [7] * 128


def write_keys(file: Path, **tenants: dict[str, Any]) -> Path:
    """Replace the file in one step, as careful people do."""
    draft = file.with_suffix(".draft")
    draft.write_text(yaml.safe_dump({"tenants": tenants}))
    os.replace(draft, file)
    return file


def entry(*keys: str, **limits: Any) -> dict[str, Any]:
    return {"keys": [key_hash(key) for key in keys], **limits}


def ask(live: Live, key: str, prompt: Any = "hi", **fields: Any) -> httpx.Response:
    return live.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields}, authorization=f"Bearer {key}")


@pytest.fixture
def keyed(start_gateway: StartGateway, tmp_path: Path) -> Live:
    file = write_keys(tmp_path / "keys.yaml", a=entry(A_KEY), b=entry(B_KEY), shut=entry(C_KEY, disabled=True))
    return start_gateway(keys_file=file, files_check_s=0.05)


def test_without_a_keys_file_nobody_needs_a_key(live: Live) -> None:
    assert live.complete().status_code == 200
    assert live.engine.jobs[0].request.tenant == "default"


def test_no_key_is_401(keyed: Live) -> None:
    answer = keyed.complete()
    error = error_of(answer, 401)
    assert (error["code"], error["type"]) == ("missing_api_key", "authentication_error")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert keyed.engine.jobs == []


@pytest.mark.parametrize(
    "header",
    [
        f"Bearer {new_key()}",
        "Bearer",
        f"Bearer {A_KEY} {B_KEY}",
        f"Basic {A_KEY}",
        A_KEY,
        f"Bearer {A_KEY}x",
        f"Bearer {key_hash(A_KEY)}",
    ],
    ids=["unknown", "empty", "two", "basic", "bare", "longer", "hash"],
)
def test_a_wrong_key_is_401(keyed: Live, header: str) -> None:
    """The kept hash of a key opens nothing."""
    answer = keyed.post("/v1/completions", {"model": MODEL, "prompt": "x"}, authorization=header)
    assert error_of(answer, 401)["code"] == "invalid_api_key"
    assert keyed.engine.jobs == []


def test_two_authorization_headers_are_401(keyed: Live) -> None:
    """What a proxy and this gateway might read differently is refused."""
    headers = [("authorization", f"Bearer {A_KEY}"), ("authorization", f"Bearer {B_KEY}")]
    assert keyed.client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers).status_code == 401


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/x", "/v1/decisions/x", "/nowhere", "//health", "/health/", "/health/../v1/models"]
)
def test_every_path_but_the_public_ones_asks_for_a_key(keyed: Live, path: str) -> None:
    request = httpx.Request("GET", keyed.url)
    request.url = httpx.URL(keyed.url, raw_path=path.encode())
    assert keyed.client.send(request).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/openapi.json"])
def test_public_paths_need_no_key(keyed: Live, path: str) -> None:
    assert keyed.client.get(path).status_code == 200


def test_a_key_opens_as_its_tenant(keyed: Live) -> None:
    assert ask(keyed, A_KEY).status_code == 200
    assert ask(keyed, B_KEY).status_code == 200
    assert [job.request.tenant for job in keyed.engine.jobs] == ["a", "b"]


def test_a_disabled_tenant_is_403(keyed: Live) -> None:
    error = error_of(ask(keyed, C_KEY), 403)
    assert (error["code"], error["type"]) == ("tenant_disabled", "permission_error")


def test_tenants_share_no_block_unless_their_group_does(start_gateway: StartGateway, tmp_path: Path) -> None:
    """Equal prompts of two tenants have equal hashes only inside one sharing group."""
    lab = {"sharing_group": "lab"}
    file = write_keys(tmp_path / "k", a=entry(A_KEY, **lab), b=entry(B_KEY, **lab), lab=entry(C_KEY))
    live = start_gateway(keys_file=file)
    for key in (A_KEY, B_KEY, C_KEY):
        ask(live, key, BLOCK)
    first, second, outsider = (job.request.block_hashes for job in live.engine.jobs)
    assert first == second
    assert len(outsider) == 2
    assert set(first) & set(outsider) == set()


def test_isolated_tenants_with_equal_prompts_have_no_block_in_common(keyed: Live) -> None:
    ask(keyed, A_KEY, BLOCK)
    ask(keyed, B_KEY, BLOCK)
    first, second = (set(job.request.block_hashes) for job in keyed.engine.jobs)
    assert (len(first), first & second) == (2, set())


def test_a_decision_of_another_tenant_is_404(keyed: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def decision(_: str) -> dict[str, Any]:
        return {"request_id": "r", "tenant": "a"}

    monkeypatch.setattr(keyed.engine, "decision", decision)
    answers = [keyed.client.get("/v1/decisions/r", headers={"authorization": f"Bearer {key}"}) for key in (A_KEY, B_KEY)]
    assert [answer.status_code for answer in answers] == [200, 404]


def test_keys_rotate_without_a_restart(keyed: Live) -> None:
    """Old and new key work side by side until the old one is taken out."""
    file = keyed.server.service.settings.keys_file
    assert file is not None
    fresh = new_key()
    write_keys(file, a=entry(A_KEY, fresh))
    eventually(lambda: ask(keyed, fresh).status_code == 200)
    assert ask(keyed, A_KEY).status_code == 200
    write_keys(file, a=entry(fresh))
    eventually(lambda: ask(keyed, A_KEY).status_code == 401)
    assert ask(keyed, fresh).status_code == 200


def test_a_file_that_cannot_be_used_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_keys(tmp_path / "k", a=entry(A_KEY))
    access = Access(file)
    file.write_text(f"tenants: {{a: {{keys: ['{B_KEY}']}}}}")
    with caplog.at_level(logging.ERROR):
        assert not access.reload_if_changed()
        assert not access.reload_if_changed()
    assert access.account("/v1/models", [(b"authorization", f"Bearer {A_KEY}".encode())]).tenant.name == "a"
    assert len(caplog.records) == 1
    assert B_KEY not in caplog.text
    file.unlink()
    assert not access.reload_if_changed()
    with pytest.raises(KeysError, match="cannot read the keys file"):
        access.reload()


def test_a_used_up_concurrency_quota_is_429(start_gateway: StartGateway, tmp_path: Path) -> None:
    """Other tenants go on."""
    file = write_keys(tmp_path / "k", a=entry(A_KEY, max_in_flight=1), b=entry(B_KEY))
    live = start_gateway(keys_file=file)
    live.engine.script = Script(hold_after=1)
    headers = {"authorization": f"Bearer {A_KEY}"}
    body = {"model": MODEL, "prompt": "x", "stream": True}
    with live.client.stream("POST", "/v1/completions", json=body, headers=headers) as held:
        assert held.status_code == 200
        refused = ask(live, A_KEY)
        error = error_of(refused, 429)
        assert (error["code"], error["reason"]) == ("quota_concurrency", "quota_concurrency")
        assert int(refused.headers["retry-after"]) >= 1
        live.engine.script = Script()
        assert ask(live, B_KEY).status_code == 200
    eventually(lambda: live.server.service.in_flight == 0)
    assert ask(live, A_KEY).status_code == 200


def test_a_used_up_token_quota_is_429_until_the_debt_is_paid(start_gateway: StartGateway, tmp_path: Path) -> None:
    """Prompt and answer count; the time to wait is told."""
    file = write_keys(tmp_path / "k", a=entry(A_KEY, tokens_per_s=0.5, burst_tokens=10), b=entry(B_KEY))
    live = start_gateway(keys_file=file)
    assert ask(live, A_KEY, [7] * 15).status_code == 200
    refused = ask(live, A_KEY)
    error = error_of(refused, 429)
    assert error["code"] == "quota_tokens"
    assert 15 <= float(error["retry_after_s"]) <= 20  # 15 + 5 tokens used, 10 saved, half a token a second
    assert 15 <= int(refused.headers["retry-after"]) <= 20
    assert ask(live, B_KEY).status_code == 200
    assert len(live.engine.jobs) == 2


def test_keys_never_reach_a_log(keyed: Live, caplog: pytest.LogCaptureFixture) -> None:
    """Neither of good requests, nor of refused ones, nor of faults of ours."""
    with caplog.at_level(logging.DEBUG):
        ask(keyed, A_KEY)
        ask(keyed, "ck-unknown-secret")
        keyed.engine.script = Script(raises=RuntimeError("broken"))
        ask(keyed, A_KEY)
    assert "broken" in caplog.text
    assert A_KEY not in caplog.text
    assert "ck-unknown-secret" not in caplog.text
