"""`conductor doctor`: what it finds wrong is what would have stopped `serve`, in one line each."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from conductor import doctor
from conductor.config import load
from tests.bench.served import free_port


def findings(**flags: Any) -> dict[str, doctor.Finding]:
    keys = {name.replace("__", "."): value for name, value in flags.items()}
    config = load(None, {}, {"gateway.port": 0, **keys}).config
    return {finding.check: finding for finding in doctor.examine(config)}


def test_a_machine_that_serves_passes_every_check() -> None:
    found = findings()
    assert [finding for finding in found.values() if not finding.ok] == []
    checks = {"python", "ray", "torch", "clock", "port", "admin port", "Ray", "workers", "transports", "shared memory"}
    assert checks <= set(found)
    assert "3 workers" in found["workers"].found
    assert found["transports"].found == "object_store,cma"


@pytest.mark.parametrize(
    ("flags", "check", "words"),
    [
        ({"workers__transport": "pigeon"}, "workers", "pigeon"),
        ({"workers__transport": "pigeon"}, "transports", "pigeon"),
        ({"workers__transport": "cma,mooncake_rdma"}, "transports", "mooncake_rdma"),
        ({"cluster__object_store_mib": 10**9}, "shared memory", "object_store_mib"),
        ({"workers__prefill_blocks": 10**9}, "model and memory", "not enough memory"),
        ({"gateway__keys_file": "/nowhere/keys.yaml"}, "gateway files", "/nowhere/keys.yaml"),
        ({"flight_log__directory": "/dev/null"}, "flight log", "flight_log.directory is '/dev/null'; allowed: a directory"),
        ({"cluster__address": "ray://127.0.0.1:1"}, "Ray", "cluster.address ray://127.0.0.1:1 does not answer"),
        ({"model__name": "/nowhere"}, "model and memory", "/nowhere"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_stop_serving_is_named(flags: dict[str, Any], check: str, words: str) -> None:
    finding = findings(**flags)[check]
    assert not finding.ok
    assert words in finding.found
    assert "\n" not in finding.found


def test_taken_ports_and_absent_clusters_are_named() -> None:
    """The gateway's port, the admin port, and Ray's address."""
    absent = f"127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        admin = {"gateway__admin_port": port, "gateway__admin_key": "sha256:" + "0" * 64}
        found = findings(gateway__port=port, cluster__address=absent, **admin)
        there = findings(cluster__address=f"127.0.0.1:{port}")
    for check, words in (("port", "taken"), ("admin port", "taken"), ("Ray", absent)):
        assert not found[check].ok
        assert words in found[check].found
    assert there["Ray"].ok


def test_a_clock_that_nobody_has_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.time, "time", lambda: 0.0)
    assert not findings()["clock"].ok
