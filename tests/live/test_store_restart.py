"""A deployment is stopped and started again on the same directories: its cache is warm, and an operator can change it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from typer.testing import CliRunner

from conductor.cli import app
from conductor.gateway.keys import key_hash, new_key
from tests.bench.served import Served, free_port, serve
from tests.live.observe import eventually, metric
from tests.live.test_tiers import FULL_BLOCKS, ask, decision

pytestmark = [pytest.mark.live, pytest.mark.slow]
ADMIN_KEY = new_key()


def in_deployment(config: Path, use: Callable[[Served, openai.OpenAI], None]) -> None:
    with serve("--config", str(config), "--prefill", "1", "--decode", "1") as served:
        url = f"http://127.0.0.1:{served.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            use(served, client)


def cache(port: int, *arguments: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, ["cache", *arguments, "--url", f"http://127.0.0.1:{port}", "--json"])
    assert done.exit_code == 0, done.output
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_a_restart_finds_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text, restored by the Conductor's decision from what the former deployment left on disk."""
    monkeypatch.setenv("CONDUCTOR_OPERATOR_KEY", ADMIN_KEY)
    admin_port = free_port()
    config = tmp_path / "config.yaml"
    store = {"host_mib": 0, "disk_directory": str(tmp_path / "disk"), "shared_paths": [str(tmp_path / "shared")]}
    gateway = {"admin_port": admin_port, "admin_key": key_hash(ADMIN_KEY)}
    config.write_text(yaml.safe_dump({"store": store, "gateway": gateway, "flight_log": {"enabled": False}}))
    first: list[str] = []

    def compute(served: Served, client: openai.OpenAI) -> None:
        first.append(ask(client)[0])
        eventually(lambda: metric(served, "conductor_worker_shared_stored") >= FULL_BLOCKS)

    def restore(served: Served, client: openai.OpenAI) -> None:
        eventually(lambda: metric(served, "conductor_worker_disk_blocks") >= FULL_BLOCKS)  # told after the first snapshot
        again, cached, decision_id = ask(client)
        assert (again, cached) == (first[0], 64 * FULL_BLOCKS)
        assert any(f"/{tier}" in str(decision(served, decision_id)) for tier in ("disk", "shared"))
        operate(admin_port, tmp_path / "shared")

    in_deployment(config, compute)
    in_deployment(config, restore)


def operate(port: int, directory: Path) -> None:
    """List, verify, pin and drop through the admin port, on real tiers."""
    listed = [row for row in cache(port, "ls") if row["worker"] == "prefill-0" and row["blocks"] >= FULL_BLOCKS]
    assert {row["tier"] for row in listed} == {"disk", "shared"}
    assert all(row["damaged"] == 0 and row["checked"] >= FULL_BLOCKS for row in cache(port, "verify"))
    assert all(row["blocks"] >= FULL_BLOCKS for row in cache(port, "pin", listed[0]["hash"]))
    cache(port, "drop")
    kept = [row for row in cache(port, "stats") if row["worker"] == "prefill-0"]
    assert all(row["blocks"] >= FULL_BLOCKS and row["pinned"] >= FULL_BLOCKS for row in kept)
    cache(port, "pin", listed[0]["hash"], "--remove")
    cache(port, "drop")
    left = CliRunner().invoke(app, ["cache", "ls", "--directory", str(directory), "--json"])
    assert json.loads(left.stdout) == []
