"""What libraries that are not ours do around the conformance suite: idle, closed, without RDMA, and when a source dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.test_kv_transfer import (
    KV,
    LEASE_S,
    MakePair,
    ManualClock,
    installed,
    kv,
    kv_arrays,
    mooncake_pair,
    nixl_pair,
    same,
    take,
)
from workers.kv_transfer.base import KVTicket, KVTransport, OfferGone, TransferTimeout, TransportUnavailable
from workers.kv_transfer.rdma import rdma_devices, why_no_rdma
from workers.kv_transfer.select import make_transport

LONG_LEASE_S = 3600.0
TASKS = Path("/proc/self/task")
ROOT = Path(__file__).parents[2]


def busy_s(seconds: float, but: set[str]) -> float:
    """CPU seconds that this process' threads, other than `but`, take while nobody wants anything of them."""

    def used_ticks() -> dict[str, int]:
        ticks = {}
        for thread in TASKS.iterdir():
            if thread.name not in but:
                fields = (thread / "stat").read_text().rpartition(")")[2].split()
                ticks[thread.name] = int(fields[11]) + int(fields[12])
        return ticks

    before = used_ticks()
    time.sleep(seconds)
    return sum(ticks - before.get(name, 0) for name, ticks in used_ticks().items()) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    "make",
    [pytest.param(nixl_pair, marks=installed("nixl_cu12")), pytest.param(mooncake_pair, marks=installed("mooncake"))],
)
def test_an_idle_library_costs_nothing_and_a_closed_one_is_gone(make: MakePair) -> None:
    """Threads that wait for peers do not poll for them, and those that moved KV end with the transport."""
    before = {thread.name for thread in TASKS.iterdir()}
    source, target = make(ManualClock())
    assert same(take(target, source.offer(kv(), LEASE_S)), kv_arrays())
    working = len(list(TASKS.iterdir()))
    assert busy_s(1.0, but=before) < 0.1
    source.close()
    target.close()
    target.close()
    assert len(list(TASKS.iterdir())) < working
    assert busy_s(0.5, but=before) < 0.05
    with pytest.raises(TransportUnavailable, match="closed"):
        source.offer(kv(), LEASE_S)
    assert source.offered == 0


@pytest.mark.parametrize(
    "name", [pytest.param("nixl", marks=installed("nixl_cu12")), pytest.param("mooncake", marks=installed("mooncake"))]
)
def test_a_process_ends_as_it_wants_to(name: str) -> None:
    """No library turns its exit code into a crash, nor loses what it has written."""
    script = f"""
import atexit
from tests.workers.test_kv_transfer import KV
from workers.kv_transfer.select import make_transport
transport = make_transport({name!r}, KV)
atexit.register(print, "cleaned up")
raise SystemExit(7)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (7, "cleaned up")


@pytest.mark.parametrize("name", ["nixl_rdma", "mooncake_rdma"])
def test_rdma_that_is_absent_says_why(name: str) -> None:
    """Nothing passes TCP off as RDMA."""
    if why_no_rdma() is None:
        pytest.skip(f"this host has RDMA: {rdma_devices()}")
    with pytest.raises(TransportUnavailable, match="needs RDMA: no "):
        make_transport(name, KV)


def test_rdma_is_what_the_kernel_lists_as_active(tmp_path: Path) -> None:
    """A device without an active port carries nothing."""
    assert why_no_rdma(tmp_path / "none") == f"no device in {tmp_path / 'none'}"
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    assert rdma_devices(tmp_path) == ("mlx5_0",)
    assert why_no_rdma(tmp_path) is None
    (tmp_path / "mlx5_0" / "ports" / "1" / "state").write_text("1: DOWN\n")
    assert why_no_rdma(tmp_path) == "no active port on mlx5_0, mlx5_1"


def offering(name: str) -> Any:
    """What runs in another process: a source of 4,000 blocks."""

    class Source:
        def offer(self) -> Any:
            self.transport = make_transport(name, KV)
            return self.transport.offer(kv(blocks=4000), LONG_LEASE_S)

    return Source


@pytest.mark.live
@pytest.mark.parametrize(
    "name",
    [
        "object_store",
        "cma",
        pytest.param("rdt_nixl", marks=installed("nixl")),
        pytest.param("nixl", marks=installed("nixl_cu12")),
        pytest.param("mooncake", marks=installed("mooncake")),
    ],
)
def test_an_offer_dies_with_its_source(local_ray: Any, name: str) -> None:
    """KV that a killed actor offered is reported gone, in time, and the target lives on."""
    target = make_transport(name, KV)
    source = local_ray.remote(enable_tensor_transport=name.startswith("rdt_"))(offering(name))
    actors = [source.options(num_cpus=0).remote() for _ in range(2)]
    alive, doomed = local_ray.get([actor.offer.remote() for actor in actors])
    assert same(take(target, doomed), kv_arrays(blocks=4000))
    local_ray.kill(actors[1])
    with pytest.raises((OfferGone, TransferTimeout)) as refused:
        fetch_until_refused(target, doomed)
    assert "lease" not in str(refused.value)
    assert same(take(target, alive), kv_arrays(blocks=4000))
    local_ray.kill(actors[0])
    target.close()


def fetch_until_refused(target: KVTransport, ticket: KVTicket) -> None:
    """The bytes may still be there for a moment."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        take(target, ticket)
        time.sleep(0.2)


@pytest.mark.live
def test_two_sided_direct_transport_cannot_serve_tickets(local_ray: Any) -> None:
    """Why there is no Ray Direct Transport over gloo: Ray lets no source offer a tensor that a target may come for."""
    with pytest.raises(ValueError, match="not supported for two-sided RDT transport 'GLOO'"):
        local_ray.put(torch.zeros(4), _tensor_transport="gloo")
