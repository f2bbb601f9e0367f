"""What the Conductor's index believes of every tier, against what the tiers really hold, while everything evicts everything."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from conductor.core.commands import RequestSnapshot
from conductor.core.config import SchedulerConfig
from conductor.core.events import Event, WorkerJoined
from conductor.core.scheduler import Scheduler
from conductor.core.types import SHARED_STORE, BlockHash, Holder, Tier
from tests.workers.actor_doubles import Cluster, RecordingConductor, make_job, place, until
from tests.workers.doubles import BLOCK_TOKENS, expected_output, scarce_tiers
from workers.assembly import node_of


class BelievingConductor(RecordingConductor):
    """A scheduler that hears all reports, and asks for the snapshots that it misses."""

    def __init__(self, workers: dict[str, Any]) -> None:
        super().__init__()
        self.workers = workers
        self.scheduler = Scheduler(SchedulerConfig(block_tokens=BLOCK_TOKENS))
        self.joined: set[str] = set()

    async def report(self, events: Sequence[Event]) -> None:
        for worker_id in self.workers.keys() - self.joined:
            self.joined.add(worker_id)
            self.scheduler.handle(WorkerJoined(await self.workers[worker_id].describe(), 1), time.monotonic())
        for event in events:
            for command in self.scheduler.handle(event, time.monotonic()):
                if isinstance(command, RequestSnapshot):
                    await self.workers[command.source].snapshot()
        self.scheduler.check()

    def claims(self, holder: Holder, known: set[BlockHash]) -> set[BlockHash]:
        return {block for block in known if holder in self.scheduler._index.holders(block)}


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    cluster.conductor = BelievingConductor(cluster.workers)
    yield cluster
    await cluster.close()


@pytest.mark.parametrize("seed", range(3))
async def test_the_index_comes_to_claim_what_is_held(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    """Two workers of one host share tiers too small for their prompts: every answer is right, and when it is quiet the index
    claims no block that is gone, and none of host memory and shared directory is missing."""
    store = scarce_tiers("test", tmp_path, 16, 24, 30, report_interval_s=0.05, look_interval_s=0.1)
    workers = [await cluster.add(name, store=store, num_blocks=24) for name in ("p0", "p1")]
    await cluster.add("d0", num_blocks=64)
    dice, known = random.Random(seed), set()
    for number in range(24):
        tokens = [dice.randrange(3)] * 8 + [dice.randrange(2)] * 8 + [number] * dice.randrange(1, 12)
        job = make_job(f"r{number}", tokens)
        known.update(job.request.block_hashes)
        worker, tier = dice.choice(workers), dice.choice(list(Tier))
        owner = {Tier.DEVICE: "d0", Tier.SHARED: SHARED_STORE}.get(tier, node_of(worker.config))
        await cluster.submit(job, place(job, worker.id, "d0", fetched=16, source=owner, tier=tier))
        assert await cluster.output_of(f"r{number}") == expected_output(tokens, 8)
    for worker in workers:
        assert await asyncio.to_thread(worker.store.flush, 20)
    conductor, node = cluster.conductor, node_of(workers[0].config)
    assert isinstance(conductor, BelievingConductor)
    for tier, owner in ((Tier.HOST, node), (Tier.SHARED, SHARED_STORE)):
        kept = workers[0].store.tiers[tier]
        await until(
            lambda kept=kept, tier=tier, owner=owner: conductor.claims(Holder(owner, tier), known) == set(kept._names()) & known
        )
    on_disk = {block for worker in workers for block in worker.store.tiers[Tier.DISK].snapshot()}
    assert conductor.claims(Holder(node, Tier.DISK), known) <= on_disk
    assert sum(report.evicted for worker in workers for report in worker.store.reports()) > 0
