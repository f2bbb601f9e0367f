"""Workers above their tiers, without Ray: what is restored is what was computed, reports are true, bad days cost only time."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from conductor.core.events import BlocksRemoved, BlocksStored, IndexSnapshot, LoadReported, PrefillFinished, TransferFinished
from conductor.core.types import SHARED_STORE, BlockHash, Tier
from tests.workers.actor_doubles import Cluster, make_job, place, until
from tests.workers.doubles import expected_output
from tests.workers.kv_store.doubles import damage
from workers.assembly import node_of
from workers.kv_store.files import Files
from workers.kv_store.records import HEADER_BYTES
from workers.kv_store.settings import StoreSettings
from workers.kv_store.shared_memory import host_directory

PROMPT = tuple((7 * i) % 91 for i in range(26))
BLOCKS, REUSED = 6, 24
BLOCK_BYTES = 4 * 32
ALL = (Tier.HOST, Tier.DISK, Tier.SHARED)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


@pytest.fixture
def store(tmp_path: Path) -> StoreSettings:
    """All three tiers; host memory under a name of its own, which is gone when the test is over."""
    return StoreSettings(
        deployment=f"test-{uuid4().hex}",
        host_bytes=1 << 20,
        disk_directory=tmp_path / "disk",
        disk_bytes=1 << 20,
        shared_paths=(str(tmp_path / "shared"),),
        shared_bytes=1 << 20,
        report_interval_s=0.02,
    )


def only(store: StoreSettings, tier: Tier) -> StoreSettings:
    """The same with one tier alone."""
    kept = {Tier.HOST: "host_bytes", Tier.DISK: "disk_bytes", Tier.SHARED: "shared_bytes"}
    return replace(store, **{name: 0 for other, name in kept.items() if other is not tier})


def memory_of(store: StoreSettings, worker: Any) -> Path:
    return host_directory(store.deployment, node_of(worker.config))


async def run(cluster: Cluster, worker_id: str, tier: Tier | None = None, request_id: str | None = None) -> int:
    """One request on one worker, whose prefix is to come from `tier`; tokens that were reused. The answer must be right."""
    job = make_job(request_id or f"{worker_id}-{uuid4().hex[:6]}", PROMPT)
    worker = cluster.workers[worker_id]
    owner = SHARED_STORE if tier is Tier.SHARED else node_of(worker.config)
    await cluster.submit(
        job,
        place(job, worker_id, "d0", fetched=REUSED if tier else 0, source=owner if tier else None, tier=tier or Tier.DEVICE),
    )
    assert await cluster.output_of(job.request.id) == expected_output(PROMPT, 8)
    reused = cluster.outputs[job.request.id][0].reused_tokens
    assert reused is not None
    return reused


async def join(cluster: Cluster, worker_id: str, **options: Any) -> Any:
    """Add a worker, and wait for its snapshot, which covers whatever was found before it."""
    told = len(cluster.conductor.of(IndexSnapshot))
    worker = await cluster.add(worker_id, **options)
    await until(lambda: len(cluster.conductor.of(IndexSnapshot)) > told)
    return worker


async def filled(cluster: Cluster, store: StoreSettings) -> None:
    """A worker has computed the prompt, and every tier has it; then the worker is gone in good order."""
    await join(cluster, "p0", store=store)
    await join(cluster, "d0")
    assert await run(cluster, "p0") == 0
    worker = cluster.workers["p0"]
    assert await asyncio.to_thread(worker.store.flush, 20)


async def leave(cluster: Cluster, worker_id: str) -> None:
    worker = cluster.workers.pop(worker_id)
    await worker.close()
    cluster.handles.pop(worker_id).dead = True


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.suffix in (".seg", ".kv") and "quarantine" not in path.parts)


def latest(cluster: Cluster, worker_id: str, tier: Tier) -> Any:
    """The worker's last report of a tier."""
    told = [event for event in cluster.conductor.of(LoadReported) if event.worker_id == worker_id]
    return next((report for event in reversed(told) for report in event.tiers if report.tier is tier), None)


# --- hits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ALL)
async def test_what_one_worker_computed_another_restores(cluster: Cluster, store: StoreSettings, tier: Tier) -> None:
    """From host memory, from the host's disk and from the shared directory, on a worker that has never seen the prompt."""
    await filled(cluster, store)
    await join(cluster, "p1", store=only(store, tier))
    assert await run(cluster, "p1", tier) == REUSED
    await until(lambda: any(event.reused_tokens == REUSED for event in cluster.conductor.of(PrefillFinished)))


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.SHARED])
async def test_a_restart_finds_what_was_kept_and_says_so_at_once(cluster: Cluster, store: StoreSettings, tier: Tier) -> None:
    """The first snapshot of the next life claims what the disk holds, and it is restored."""
    await filled(cluster, store)
    await leave(cluster, "p0")
    cluster.conductor.events.clear()
    await join(cluster, "p0", store=only(store, tier))
    (snapshot,) = cluster.conductor.of(IndexSnapshot)
    assert set(snapshot.blocks[tier]) >= set(make_job("r", PROMPT).request.block_hashes)
    assert await run(cluster, "p0", tier) == REUSED


async def test_every_tier_is_told_as_a_holder_of_its_own(cluster: Cluster, store: StoreSettings) -> None:
    await filled(cluster, store)
    for tier in (Tier.DEVICE, *ALL):
        await until(
            lambda tier=tier: (
                {b for e in cluster.conductor.of(BlocksStored) if e.tier is tier for b in e.blocks}
                >= set(make_job("r", PROMPT).request.block_hashes)
            )
        )
    await until(lambda: latest(cluster, "p0", Tier.DISK) is not None and latest(cluster, "p0", Tier.DISK).stored >= BLOCKS)
    described = await cluster.workers["p0"].describe()
    assert set(described.capacity_blocks) == set(Tier)


async def test_a_peer_without_the_tier_gets_it_through_its_owner(cluster: Cluster, store: StoreSettings) -> None:
    """Blocks that only another node's disk holds are brought up there and pulled."""
    await filled(cluster, store)
    await leave(cluster, "p0")
    await join(cluster, "p1", store=only(store, Tier.DISK), node="far")
    await join(cluster, "p2", node="near")
    job = make_job("r2", PROMPT)
    placement = place(job, "p2", "d0", fetched=REUSED, source="far", tier=Tier.DISK)
    await cluster.workers["p2"].prefill(job, placement, cluster.handles["d0"], cluster.handles["p1"])
    assert await cluster.output_of("r2") == expected_output(PROMPT, 8)
    assert cluster.outputs["r2"][0].reused_tokens == REUSED


async def test_what_lies_below_a_pool_alone_is_copied_out_of_it(cluster: Cluster, store: StoreSettings) -> None:
    """As the last worker of a host is asked to before it goes."""
    await filled(cluster, store)
    await leave(cluster, "p0")
    await join(cluster, "p1", store=only(store, Tier.DISK), node="far")
    await join(cluster, "p2", node="near")
    blocks = make_job("r2", PROMPT).request.block_hashes[:BLOCKS]
    await cluster.workers["p2"].pull_blocks("drain-1", cluster.handles["p1"], blocks)
    await until(lambda: [event.transfer_id for event in cluster.conductor.of(TransferFinished)] == ["drain-1"])
    assert cluster.workers["p2"].cache.match(blocks) == BLOCKS


async def test_the_answer_is_kept_for_the_next_turn(cluster: Cluster, store: StoreSettings) -> None:
    """The decode worker adds its own blocks to what the prefill worker has kept."""
    await join(cluster, "p0", store=only(store, Tier.HOST))
    await join(cluster, "d0", store=only(store, Tier.HOST))
    await run(cluster, "p0")
    told = cluster.conductor
    await until(lambda: any(e.tier is Tier.HOST and e.stamp.source == "d0" for e in told.of(BlocksStored)))


# --- memory -----------------------------------------------------------------------------------------------------------


async def test_host_memory_lives_as_long_as_any_worker_of_the_host(cluster: Cluster, store: StoreSettings) -> None:
    """The worker that computed the prefix leaves, another one still maps it; with the last one the memory is gone."""
    memory = only(store, Tier.HOST)
    await filled(cluster, memory)
    await join(cluster, "p1", store=memory)
    where = memory_of(store, cluster.workers["p1"])
    await leave(cluster, "p0")
    assert await run(cluster, "p1", Tier.HOST) == REUSED
    assert len(files_of(where)) >= BLOCKS
    await leave(cluster, "p1")
    assert not where.exists()


# --- bad days ---------------------------------------------------------------------------------------------------------


def flip(data: bytearray) -> None:
    data[HEADER_BYTES + 9] ^= 1


def cut(data: bytearray) -> None:
    del data[HEADER_BYTES + 20 :]


@pytest.mark.parametrize("change", [flip, cut])
@pytest.mark.parametrize("tier", ALL)
async def test_damage_is_computed_again_and_reported(
    cluster: Cluster, store: StoreSettings, tier: Tier, change: Callable[[bytearray], None]
) -> None:
    """Every file of the tier is damaged: the answer is right, the claims are taken back, the count goes up."""
    await filled(cluster, store)
    await join(cluster, "p1", store=only(store, tier))
    roots = {Tier.HOST: memory_of(store, cluster.workers["p1"]), Tier.DISK: store.disk_directory}
    for path in files_of(roots.get(tier) or Path(store.shared_paths[0])):
        damage(path, change)
    assert await run(cluster, "p1", tier) < REUSED
    first = make_job("r", PROMPT).request.block_hashes[0]
    await until(lambda: any(first in e.blocks and e.tier is tier for e in cluster.conductor.of(BlocksRemoved)))
    await until(lambda: latest(cluster, "p1", tier) is not None and latest(cluster, "p1", tier).quarantined >= 1)


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.SHARED])
async def test_a_directory_deleted_under_a_worker_is_an_empty_tier(cluster: Cluster, store: StoreSettings, tier: Tier) -> None:
    """Nothing is served that is gone, nothing fails, and the tier fills again or says why not."""
    await filled(cluster, store)
    await join(cluster, "p1", store=only(store, tier))
    shutil.rmtree(store.disk_directory if tier is Tier.DISK else store.shared_paths[0])  # type: ignore[arg-type]
    assert await run(cluster, "p1", tier) == 0
    first = make_job("r", PROMPT).request.block_hashes[0]
    await until(lambda: any(first in e.blocks and e.tier is tier for e in cluster.conductor.of(BlocksRemoved)))


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.SHARED])
async def test_a_directory_that_cannot_be_used_leaves_a_worker_without_the_tier(
    cluster: Cluster, store: StoreSettings, tier: Tier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Said in the log and in the report; requests are served."""
    (tmp_path / "file").write_text("")
    bad = only(store, tier)
    bad = replace(bad, disk_directory=tmp_path / "file" / "below", shared_paths=(str(tmp_path / "file" / "below"),))
    await join(cluster, "p0", store=bad)
    await join(cluster, "d0")
    assert await run(cluster, "p0", tier) == 0
    assert f"there is no {tier.name.lower()} tier" in caplog.text
    await until(lambda: latest(cluster, "p0", tier) is not None and "file" in latest(cluster, "p0", tier).failure)


@pytest.mark.parametrize("tier", ALL)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
async def test_a_tier_that_takes_nothing_is_reported_and_harms_nobody(
    cluster: Cluster, store: StoreSettings, tier: Tier, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full, read-only or broken: the worker serves on, and the failure reaches the Conductor."""

    def fail(self: Files, path: Path, buffers: object) -> None:
        raise OSError(error, os.strerror(error), str(path))

    await join(cluster, "p0", store=only(store, tier))
    await join(cluster, "d0")
    monkeypatch.setattr(Files, "append", fail)
    assert await run(cluster, "p0") == 0
    await until(lambda: os.strerror(error) in str(latest(cluster, "p0", tier)))
    assert await run(cluster, "p0") == REUSED


async def test_a_slow_disk_delays_no_request(cluster: Cluster, store: StoreSettings) -> None:
    """Writing takes seconds a block: requests are answered meanwhile, and what does not fit the queue is counted."""
    slow = replace(only(store, Tier.DISK), throttle_bytes_per_s=1e9, queue_blocks=BLOCKS)
    worker = await join(cluster, "p0", store=slow)
    await join(cluster, "d0")
    worker.store.tiers[Tier.DISK]._files._bytes_per_s = 200.0
    assert await run(cluster, "p0") == 0
    for number in range(3):
        job = make_job(f"other-{number}", tuple((11 * i + number) % 83 for i in range(26)))
        await cluster.submit(job, place(job, "p0", "d0"))
        await cluster.output_of(job.request.id)
    assert worker.store.reports()[0].stored == 0
    await until(lambda: worker.store.reports()[0].dropped > 0)
    worker.store.tiers[Tier.DISK]._files._bytes_per_s = 1e9


async def test_a_disk_slower_than_computing_is_known_as_such(cluster: Cluster, store: StoreSettings) -> None:
    """The throttle shows in the speed that the worker tells the Conductor."""
    worker = await join(cluster, "p0", store=replace(only(store, Tier.SHARED), throttle_bytes_per_s=1 << 27))
    (speed,) = worker._parts.tiers.bytes_per_s.values()
    assert speed <= 1 << 27


@pytest.mark.parametrize("tier", ALL)
async def test_another_namespace_finds_nothing(cluster: Cluster, store: StoreSettings, tier: Tier) -> None:
    """Model or layout changed under a warm cache: no hit, no wrong token, and the old blocks stay."""
    await filled(cluster, store)
    await join(cluster, "p1", store=only(store, tier), namespace="chain-2")
    assert await run(cluster, "p1", tier) == 0
    assert await run(cluster, "p0", tier) == REUSED


def claimed(cluster: Cluster, worker_id: str) -> set[BlockHash]:
    """What a worker has told of the shared store."""
    claims: set[BlockHash] = set()
    for event in cluster.conductor.events:
        if isinstance(event, IndexSnapshot) and event.stamp.source == worker_id:
            claims = set(event.blocks[Tier.SHARED])
        elif isinstance(event, BlocksStored | BlocksRemoved) and (event.stamp.source, event.tier) == (worker_id, Tier.SHARED):
            (claims.update if isinstance(event, BlocksStored) else claims.difference_update)(event.blocks)
    return claims


@pytest.mark.parametrize("most", [BLOCKS, 1])
async def test_two_clusters_share_one_directory(store: StoreSettings, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each learns of what the other has stored, and finds it; nothing else of them touches. A little is told as it is, much in
    a snapshot."""
    monkeypatch.setattr("workers.reporter.MAX_LOOKED_BLOCKS", most)
    shared = replace(only(store, Tier.SHARED), look_interval_s=0.02)
    first, second = Cluster(), Cluster()
    try:
        await join(second, "p0", store=replace(shared, deployment="other"))
        await join(second, "d0")
        await filled(first, shared)
        wanted = set(make_job("r", PROMPT).request.block_hashes)
        await until(lambda: claimed(second, "p0") == wanted)
        assert await run(second, "p0", Tier.SHARED) == REUSED
        await first.workers["p0"].cache_command("drop", None)
        await until(lambda: claimed(second, "p0") == set())
        snapshots = [event for event in second.conductor.of(IndexSnapshot) if event.stamp.source == "p0"]
        assert (len(snapshots) == 1) == (most == BLOCKS)
    finally:
        await first.close()
        await second.close()


async def test_a_cancelled_restore_keeps_nothing_pinned(cluster: Cluster, store: StoreSettings) -> None:
    """The client leaves while its prefix is read; `Cluster.close` counts what is pinned."""
    await filled(cluster, store)
    await join(cluster, "p1", store=only(store, Tier.DISK))
    job = make_job("gone", PROMPT)
    placement = place(job, "p1", "d0", fetched=REUSED, source=node_of(cluster.workers["p1"].config), tier=Tier.DISK)
    await cluster.submit(job, placement)
    await cluster.workers["p1"].cancel("gone", 1)
    assert await run(cluster, "p1", Tier.DISK) == REUSED


async def test_an_operator_is_answered_in_json(cluster: Cluster, store: StoreSettings) -> None:
    """Look, pin, drop, unpin and verify, on every tier of a worker at once; what is dropped is told."""
    await filled(cluster, store)
    worker = cluster.workers["p0"]
    last = make_job("r", PROMPT).request.block_hashes[-1]
    stats = json.loads(json.dumps(await worker.cache_command("stats", None)))
    assert [stats[tier]["blocks"] for tier in ("host", "disk", "shared")] == [BLOCKS] * 3
    listed = json.loads(json.dumps(await worker.cache_command("ls", None)))
    assert {tier: [row["hash"] for row in rows] for tier, rows in listed.items()} == {key: [f"{last:032x}"] for key in listed}
    everywhere = dict.fromkeys(listed, BLOCKS)
    assert await worker.cache_command("pin", last) == everywhere
    assert await worker.cache_command("drop", None) == dict.fromkeys(listed, 0)
    assert await worker.cache_command("unpin", last) == everywhere
    assert await worker.cache_command("verify", None) == {key: {"checked": BLOCKS, "damaged": 0} for key in listed}
    assert await worker.cache_command("drop", None) == everywhere
    for tier in ALL:
        await until(lambda tier=tier: any(last in e.blocks and e.tier is tier for e in cluster.conductor.of(BlocksRemoved)))
