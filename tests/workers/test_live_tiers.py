"""The same tokens from every tier, on real Ray actors with the default model: computed, device, host, disk and shared store."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from conductor.cluster import ConductorActor
from conductor.core.config import SchedulerConfig
from conductor.core.cost_profile import CostProfile
from conductor.core.messages import TokenOutput
from conductor.core.types import SHARED_STORE, Role, Tier
from models.pull import DEFAULT_MODEL
from tests.workers.actor_doubles import PROFILE, place
from tests.workers.kv_store.doubles import damage
from tests.workers.test_live import TOKENS, Conductor, collect, job, uncached, until
from tests.workers.test_tiers import files_of, flip, only
from workers.config import WorkerConfig
from workers.decode import DecodeWorker
from workers.kv_store.settings import StoreSettings
from workers.kv_store.shared_memory import host_directory
from workers.prefill import PrefillWorker

pytestmark = [pytest.mark.live, pytest.mark.slow]
NODE = "tiers-test"
REUSED = 128
OTHER = TOKENS[::-1]
STORAGE_BYTES_PER_S = 2e7
BLOCK_BYTES = 64 * 46_080
SLOW_COMPUTE = CostProfile(0.01, 0.1, 0.0, 0.01, 0.001, 0.0, kv_bytes_per_token=46_080, block_tokens=64)
"""Any way to a cached prefix is better than to compute it."""


class Actors:
    """Workers by name; every answer is kept, and must be the first one's."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.handles: dict[str, Any] = {}
        self.outputs: list[TokenOutput] = []
        self.readers: list[asyncio.Task[None]] = []
        self.conductor = ray.remote(Conductor).options(num_cpus=0).remote()

    async def start(self, worker_id: str, store: StoreSettings, **changes: Any) -> None:
        prefill = worker_id.startswith("p")
        config = WorkerConfig(
            worker_id=worker_id,
            role=Role.PREFILL if prefill else Role.DECODE,
            model=DEFAULT_MODEL,
            num_blocks=24,
            chunk_tokens=64,
            store=store,
            **({"profile": PROFILE, "node": NODE} | changes),
        )
        kind = PrefillWorker if prefill else DecodeWorker
        handle = self.ray.remote(kind).options(num_cpus=0, max_concurrency=100).remote(config)
        await handle.describe.remote()
        await handle.attach.remote(self.conductor, 1)
        self.handles[worker_id] = handle
        self.readers.append(asyncio.create_task(collect(handle, self.outputs)))

    async def ask(
        self, worker_id: str, tier: Tier | None = None, tokens: tuple[int, ...] = TOKENS
    ) -> tuple[list[int | None], int | None]:
        """Tokens of the answer, and how many tokens of the prompt were reused."""
        work = job(f"{worker_id}-{uuid4().hex[:6]}", tokens)
        placement = place(work, worker_id, "d0")
        if tier is not None:
            owner = SHARED_STORE if tier is Tier.SHARED else NODE
            placement = place(work, worker_id, "d0", fetched=REUSED, source=owner, tier=tier)
        await self.handles[worker_id].prefill.remote(work, placement, self.handles["d0"], None)
        return await self.answer(work.request.id)

    async def answer(self, request_id: str) -> tuple[list[int | None], int | None]:
        async def ended() -> bool:
            return any(o.request_id == request_id and o.finish_reason for o in self.outputs)

        await until(ended)
        answer = sorted((o for o in self.outputs if o.request_id == request_id), key=lambda o: o.index)
        return [output.token_id for output in answer], answer[0].reused_tokens

    async def begin(self, worker_id: str, tier: Tier) -> None:
        """Send a request whose prefix lies in a tier, and wait for nothing."""
        work = job(f"{worker_id}-{uuid4().hex[:6]}")
        owner = SHARED_STORE if tier is Tier.SHARED else NODE
        placement = place(work, worker_id, "d0", fetched=REUSED, source=owner, tier=tier)
        await self.handles[worker_id].prefill.remote(work, placement, self.handles["d0"], None)

    async def written(self, worker_id: str, tier: Tier, prompts: int) -> None:
        """Until the worker's tier has so many prompts."""

        async def there() -> bool:
            reports = (await self.handles[worker_id].stats.remote())["tiers"]
            return any(report["tier"] is tier and report["blocks"] >= prompts * REUSED // 64 for report in reports)

        await until(there)

    async def kill(self, worker_id: str) -> None:
        """SIGKILL."""
        handle = self.handles.pop(worker_id)
        os.kill((await handle.stats.remote())["pid"], signal.SIGKILL)
        with pytest.raises(Exception, match="died"):
            await handle.alive.remote()

    async def close(self) -> None:
        for reader in self.readers:
            reader.cancel()
        for handle in self.handles.values():
            await handle.close.remote()
            self.ray.kill(handle)


@pytest.fixture
async def actors(local_ray: Any) -> AsyncIterator[Actors]:
    actors = Actors(local_ray)
    yield actors
    await actors.close()


async def test_every_tier_gives_the_same_tokens(actors: Actors, tmp_path: Path) -> None:
    """And a worker that is killed takes nothing with it that others need, leaks no memory, and comes back to a warm disk."""
    store = StoreSettings(
        deployment=f"test-{uuid4().hex}",
        host_bytes=64 << 20,
        disk_directory=tmp_path / "disk",
        disk_bytes=256 << 20,
        shared_paths=(str(tmp_path / "shared"),),
        shared_bytes=256 << 20,
        report_interval_s=0.1,
    )
    await asyncio.gather(actors.start("p0", store), actors.start("p1", store), actors.start("d0", only(store, Tier.HOST)))
    (memory,) = host_directory(store.deployment, NODE).parent.glob(f"{store.deployment}-*@{NODE}")
    computed, nothing = await actors.ask("p0")
    assert (computed, nothing) == (uncached(), 0)
    other, _ = await actors.ask("p0", tokens=OTHER)
    assert await actors.ask("p0") == (computed, REUSED)  # device
    await actors.written("p0", Tier.SHARED, prompts=2)
    assert await actors.ask("p1", Tier.HOST) == (computed, REUSED)  # computed by another worker of the host
    await actors.kill("p0")
    await actors.kill("p1")
    assert len(files_of(memory)) >= 2  # the decode worker has them mapped still
    slow = replace(only(store, Tier.DISK), throttle_bytes_per_s=8e6)
    read_slowly = replace(only(store, Tier.SHARED), throttle_bytes_per_s=STORAGE_BYTES_PER_S)
    apart = [actors.start(one, read_slowly, node=f"host-of-{one}", profile=SLOW_COMPUTE) for one in ("p3", "d1")]
    await asyncio.gather(actors.start("p1", slow), *apart)
    await actors.begin("p1", Tier.DISK)
    await actors.kill("p1")  # in the middle of a restore
    await actors.start("p2", only(store, Tier.DISK))
    assert await actors.ask("p2", Tier.DISK) == (computed, REUSED)  # after a restart
    await goes_round_a_busy_storage_link(actors, "p3", "d1", {TOKENS: computed, OTHER: other})
    await actors.kill("d1")
    await actors.kill("p3")
    for path in files_of(tmp_path / "shared"):
        damage(path, flip)
    await actors.start("p4", only(store, Tier.SHARED))
    assert await actors.ask("p4", Tier.SHARED) == (computed, 0)  # nothing verifies
    await actors.kill("d0")  # the last of the host, and it cannot clean up
    assert memory.exists()
    await actors.start("d0", replace(only(store, Tier.HOST), deployment=f"test-{uuid4().hex}"))
    assert not memory.exists()


async def goes_round_a_busy_storage_link(
    actors: Actors, prefill: str, decode: str, answers: dict[tuple[int, ...], list[int | None]]
) -> None:
    """A Conductor has two prompts that lie in the shared store alone, written by a worker that is dead, at the same moment: the
    prefill worker reads one by itself, and the decode worker, on another host, reads the other one for it."""
    ray = actors.ray
    conductor = ray.remote(ConductorActor).options(num_cpus=0, max_concurrency=100)
    conductor = conductor.remote(SchedulerConfig(late_binding=False), None)
    for name in (prefill, decode):
        await conductor.join.remote(await actors.handles[name].describe.remote(), actors.handles[name])

    async def knows_the_store() -> bool:
        known = (await conductor.overview.remote())["workers"][prefill]["tiers"]["shared"]["blocks"]
        return bool(known == len(answers) * REUSED // 64)

    await until(knows_the_store)
    works = {tokens: job(f"busy-{number}", tokens) for number, tokens in enumerate(answers)}
    placed = await asyncio.gather(*(conductor.submit.remote(work) for work in works.values()))
    for tokens, work in works.items():
        assert await actors.answer(work.request.id) == (answers[tokens], REUSED)
    assert [one.reuse.source.owner for one in placed] == [SHARED_STORE] * 2
    records = [await conductor.decision.remote(one.request_id) for one in placed]
    assert sorted((record["reuse"]["relay"] for record in records), key=str) == [None, decode]
    (reckoning,) = (record["relay"] for record in records if "relay" in record)
    nbytes = REUSED // 64 * BLOCK_BYTES
    assert (reckoning["worker"], reckoning["target"]) == (decode, prefill)
    assert (reckoning["own_left_bytes"], reckoning["relay_left_bytes"]) == (nbytes, 0.0)
    assert reckoning["relayed_read_s"] < reckoning["own_read_s"]
    stats = {name: await actors.handles[name].stats.remote() for name in (prefill, decode)}
    assert (stats[prefill]["relayed_reads"], stats[prefill]["failed_relays"]) == (1, 0)
    assert [report["hits"] for one in stats.values() for report in one["tiers"]] == [REUSED // 64] * 2

    async def all_is_told() -> bool:
        return bool((await conductor.status.remote()).counters["in_flight"] == 0)

    await until(all_is_told)
    ended = [(await conductor.decision.remote(one.request_id))["actual"] for one in placed]
    assert [(actual["outcome"], actual["reused_tokens"]) for actual in ended] == [("length", REUSED)] * 2
    assert (await conductor.status.remote()).counters["call_failures"] == 0
    ray.kill(conductor)
