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


class Actors:
    """Workers by name; every answer is kept, and must be the first one's."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self.handles: dict[str, Any] = {}
        self.outputs: list[TokenOutput] = []
        self.readers: list[asyncio.Task[None]] = []
        self.conductor = ray.remote(Conductor).options(num_cpus=0).remote()

    async def start(self, worker_id: str, store: StoreSettings) -> None:
        prefill = worker_id.startswith("p")
        config = WorkerConfig(
            worker_id=worker_id,
            role=Role.PREFILL if prefill else Role.DECODE,
            model=DEFAULT_MODEL,
            num_blocks=24,
            chunk_tokens=64,
            profile=PROFILE,
            node=NODE,
            store=store,
        )
        kind = PrefillWorker if prefill else DecodeWorker
        handle = self._ray.remote(kind).options(num_cpus=0, max_concurrency=100).remote(config)
        await handle.describe.remote()
        await handle.attach.remote(self.conductor, 1)
        self.handles[worker_id] = handle
        self.readers.append(asyncio.create_task(collect(handle, self.outputs)))

    async def ask(
        self, worker_id: str, tier: Tier | None = None, relay: str | None = None
    ) -> tuple[list[int | None], int | None]:
        """Tokens of the answer, and how many tokens of the prompt were reused."""
        work = job(f"{worker_id}-{uuid4().hex[:6]}")
        placement = place(work, worker_id, "d0")
        if tier is not None:
            owner = SHARED_STORE if tier is Tier.SHARED else NODE
            placement = place(work, worker_id, "d0", fetched=REUSED, source=owner, tier=tier, relay=relay)
        source = None if relay is None else self.handles[relay]
        await self.handles[worker_id].prefill.remote(work, placement, self.handles["d0"], source)

        async def ended() -> bool:
            return any(o.request_id == work.request.id and o.finish_reason for o in self.outputs)

        await until(ended)
        answer = sorted((o for o in self.outputs if o.request_id == work.request.id), key=lambda o: o.index)
        return [output.token_id for output in answer], answer[0].reused_tokens

    async def begin(self, worker_id: str, tier: Tier) -> None:
        """Send a request whose prefix lies in a tier, and wait for nothing."""
        work = job(f"{worker_id}-{uuid4().hex[:6]}")
        owner = SHARED_STORE if tier is Tier.SHARED else NODE
        placement = place(work, worker_id, "d0", fetched=REUSED, source=owner, tier=tier)
        await self.handles[worker_id].prefill.remote(work, placement, self.handles["d0"], None)

    async def written(self, worker_id: str, tier: Tier) -> None:
        """Until the worker's tier has the prompt."""

        async def there() -> bool:
            reports = (await self.handles[worker_id].stats.remote())["tiers"]
            return any(report["tier"] is tier and report["blocks"] >= len(TOKENS) // 64 for report in reports)

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
            self._ray.kill(handle)


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
    assert await actors.ask("p0") == (computed, REUSED)  # device
    await actors.written("p0", Tier.SHARED)
    assert await actors.ask("p1", Tier.HOST) == (computed, REUSED)  # computed by another worker of the host
    await actors.kill("p0")
    await actors.kill("p1")
    assert len(files_of(memory)) >= 2  # the decode worker has them mapped still
    slow = replace(only(store, Tier.DISK), throttle_bytes_per_s=8e6)
    await asyncio.gather(actors.start("p1", slow), *(actors.start(one, only(store, Tier.SHARED)) for one in ("p3", "d1")))
    await actors.begin("p1", Tier.DISK)
    await actors.kill("p1")  # in the middle of a restore
    await actors.start("p2", only(store, Tier.DISK))
    assert await actors.ask("p2", Tier.DISK) == (computed, REUSED)  # after a restart
    assert await actors.ask("p3", Tier.SHARED, relay="d1") == (computed, REUSED)  # written by a worker that is dead
    assert (await actors.handles["p3"].stats.remote())["relayed_reads"] == 1
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
