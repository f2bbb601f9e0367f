"""Conversations on a real cluster while workers and Conductor are killed, clients leave, and every tier is too small.

Every answer is known beforehand and depends on every KV entry that it was made from. Conversations go on from answer to answer,
share their beginnings, and come back after others have evicted them. Whatever holds something is asked before and after.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from ray.exceptions import RayError

from conductor.cluster import Cluster, WorkerPlan
from conductor.config import load
from conductor.core.messages import GenerationJob, SamplingParams
from conductor.core.types import FinishReason, Rejection, Request, Role, Tier
from conductor.ray_engine_client import RayEngineClient
from tests.live.chain_workers import ChainDecode, ChainPrefill, hash_prompt
from tests.workers.doubles import BLOCK_TOKENS, expected_output, packed, scarce_tiers
from workers.config import WorkerConfig
from workers.kv_store.blobs import TEMPORARY, MountedBlobs
from workers.kv_store.files import Files
from workers.kv_store.settings import StoreSettings
from workers.kv_store.shared_memory import MEMORY_ROOT

DEVICE_BLOCKS = 96
LONGEST_TOKENS = 120
LEAVING_SHARE = 0.15
BEGINNINGS = tuple(tuple(range(100 * n, 100 * n + 8 * (n + 1))) for n in range(4))
CLASSES = ("chat", "agent")
CLIENTS = 6
REST_S = 1.0
WHOLE_WITHIN_S = 120.0
QUIET_WITHIN_S = 30.0
WORKERS = {"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}
EVERYBODY = (*WORKERS, "conductor")
HELD = ("pinned_blocks", "offers", "queued", "running")


@dataclass
class Outcome:
    """`ended` counts requests by how they ended; `held` what workers hold, and `segments` their directories in shared memory,
    when all is quiet; `left` names what remains afterwards."""

    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)
    evicted: Counter[str] = field(default_factory=Counter)
    reused_tokens: int = 0
    held: Counter[str] = field(default_factory=Counter)
    segments: int = 0
    left: list[str] = field(default_factory=list)


def store(root: Path) -> StoreSettings:
    """Room for a few conversations in each tier, the more the slower it is."""
    return scarce_tiers("soak", root, 60, 80, 100, report_interval_s=0.2, look_interval_s=1.0)


def plans(settings: StoreSettings, transport: str) -> list[WorkerPlan]:
    made = []
    for worker_id, role in WORKERS.items():
        config = WorkerConfig(
            worker_id=worker_id,
            role=role,
            model="chain",
            num_blocks=DEVICE_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            chunk_tokens=16,
            max_batch=8,
            transport=transport,
            lease_s=10.0,
            report_interval_s=0.1,
            store=settings,
        )
        made.append(WorkerPlan(worker_id, role, 1, ChainPrefill if role is Role.PREFILL else ChainDecode, config))
    return made


@asynccontextmanager
async def running(settings: StoreSettings, transport: str) -> AsyncIterator[tuple[Cluster, RayEngineClient]]:
    flags = {
        "cluster.object_store_mib": 200,
        "cluster.restart_delay_s": 0.2,
        "cluster.num_cpus": len(WORKERS),
        "cluster.auth_mode": os.environ.get("RAY_AUTH_MODE", "disabled"),
        "scheduler.block_tokens": BLOCK_TOKENS,
        "scheduler.admission": "none",
        "scheduler.max_attempts": 8,
        "scheduler.migration.budget_bytes_per_s": 1e6,
        "scheduler.migration.min_heat": 1.0,
        "flight_log.enabled": False,
    }
    cluster = Cluster(load(None, {}, flags).config)
    try:
        cluster.connect()
        await cluster.start(plans(settings, transport))
        client = RayEngineClient(cluster.conductor, hash_prompt)
        await client.start()
        yield cluster, client
        await client.close()
    finally:
        await cluster.stop()


class Soak:
    """A load on a running cluster until a moment, and what came of it."""

    def __init__(
        self, cluster: Cluster, client: RayEngineClient, seed: int, until_s: float, victims: Sequence[str] = EVERYBODY
    ) -> None:
        self.outcome = Outcome()
        self._cluster, self._client, self._seed, self._until_s = cluster, client, seed, until_s
        self._victims = victims
        self._count = 0

    async def run(self) -> None:
        killing = asyncio.create_task(self._kill())
        await asyncio.gather(*(self._converse(Random(self._seed * 100 + number)) for number in range(CLIENTS)))
        await killing
        await self._settle()

    @property
    def _over(self) -> bool:
        return time.monotonic() >= self._until_s

    # --- clients ------------------------------------------------------------------------------------------------------

    async def _converse(self, dice: Random) -> None:
        """One conversation after the other; what was said before is told again with every turn."""
        while not self._over:
            tokens = [*dice.choice(BEGINNINGS), *(dice.randrange(6) for _ in range(dice.randrange(3, 20)))]
            traffic_class = dice.choice(CLASSES)
            while len(tokens) < LONGEST_TOKENS and not self._over:
                count = dice.randrange(1, 12)
                leaves_after = dice.randrange(count) if dice.random() < LEAVING_SHARE else None
                await self._ask(tuple(tokens), count, traffic_class, leaves_after)
                tokens += expected_output(tokens, count) + [dice.randrange(900) for _ in range(dice.randrange(2, 12))]

    async def _ask(self, tokens: tuple[int, ...], count: int, traffic_class: str, leaves_after: int | None) -> None:
        """Until it has ended, again where it was refused or the Conductor was just not there."""
        while True:
            self._count += 1
            request_id = f"r{self._count}"
            request = Request(request_id, len(tokens), hash_prompt(packed(tokens), ""), count, traffic_class=traffic_class)
            try:
                decision = await self._client.submit(
                    GenerationJob(request, packed(tokens), SamplingParams(count), self._client.channel)
                )
            except RayError:  # the Conductor has just been killed
                self.outcome.ended["not taken"] += 1
                await asyncio.sleep(REST_S)
                continue
            if not isinstance(decision, Rejection):
                break
            self.outcome.ended[f"refused: {decision.reason}"] += 1
            await asyncio.sleep(REST_S)
        await self._read(request_id, expected_output(tokens, count), leaves_after)

    async def _read(self, request_id: str, expected: list[int], leaves_after: int | None) -> None:
        got: list[int | None] = []
        async for output in self._client.outputs(request_id):
            if output.token_id is not None:
                got.append(output.token_id)
            if not got[1:]:
                self.outcome.reused_tokens += output.reused_tokens or 0
            if output.finish_reason is not None and output.finish_reason is not FinishReason.LENGTH:
                self.outcome.ended[f"{output.finish_reason}: {output.message}"] += 1
            elif output.finish_reason is not None:
                self.outcome.ended["finished"] += 1
                if got != expected:
                    self.outcome.wrong.append(f"{request_id}: {got} for {expected}")
            elif leaves_after is not None and len(got) > leaves_after:
                with suppress(RayError):  # a Conductor that has just been killed has forgotten the request anyway
                    await self._client.cancel(request_id)
                self.outcome.ended["left"] += 1
                leaves_after = None
                break
        if got != expected[: len(got)]:
            self.outcome.wrong.append(f"{request_id}: {got} begins no {expected}")

    # --- kills --------------------------------------------------------------------------------------------------------

    async def _kill(self) -> None:
        """SIGKILL for one after the other, whenever the cluster is whole."""
        dice = Random(self._seed)
        while not self._over:
            for victim in dice.sample(self._victims, len(self._victims)):
                await self._whole()
                await asyncio.sleep(dice.uniform(0.5, 3 * REST_S))
                if self._over:
                    return
                os.kill(await self._pid(victim), signal.SIGKILL)
                self.outcome.killed[victim] += 1

    async def _pid(self, victim: str) -> int:
        if victim == "conductor":
            return int(await self._cluster.conductor.pid.remote())
        return int((await self._cluster.handle(victim).stats.remote())["pid"])

    async def _whole(self, *, idle: bool = False) -> None:
        async with asyncio.timeout(WHOLE_WITHIN_S):
            while True:
                status = await self._client.status()
                if status.ready and set(status.workers) == set(WORKERS) and not (idle and status.counters.get("in_flight")):
                    return
                await asyncio.sleep(0.1)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Wait until nothing is under way, or until it is clear that it stays, and count what is held and was evicted."""
        await self._whole(idle=True)
        for worker_id in WORKERS:
            stats = await self._quiet(worker_id)
            self.outcome.held.update({name: stats[name] for name in HELD})
            self.outcome.held["false_claims"] += await self._false_claims(worker_id)
            self.outcome.held["lost_blocks"] += stats["num_blocks"] - stats["free_blocks"] - stats["cached_idle_blocks"]
            self.outcome.evicted.update({Tier(report["tier"]).name: report["evicted"] for report in stats["tiers"]})

    async def _false_claims(self, worker_id: str) -> int:
        """How many blocks the index believes in a device pool beyond those that are there, once reports have had their time.
        Both change meanwhile, for hot prefixes go on being copied."""
        beyond = 1
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIET_WITHIN_S):
                while beyond > 0:
                    status = await self._client.status()
                    stats = await self._cluster.handle(worker_id).stats.remote()
                    claimed = status.workers.get(worker_id, {}).get("indexed_blocks")
                    if claimed is not None:
                        beyond = int(claimed) - stats["cached_idle_blocks"]
                    await asyncio.sleep(0.1)
        return max(0, beyond)

    async def _quiet(self, worker_id: str) -> dict[str, Any]:
        stats: dict[str, Any] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIET_WITHIN_S):
                while not stats or any(stats[name] for name in HELD):
                    stats = await self._cluster.handle(worker_id).stats.remote()
                    await asyncio.sleep(0.1)
        return stats


def segments(deployment: str) -> list[str]:
    """The directories in shared memory that workers of a deployment have made."""
    return sorted(str(path) for path in MEMORY_ROOT.glob(f"kv-conductor-*/{deployment}*"))


async def soak(root: Path, seconds: float, seed: int, transport: str = "auto", victims: Sequence[str] = EVERYBODY) -> Outcome:
    settings = store(root)
    async with running(settings, transport) as (cluster, client):
        load_on = Soak(cluster, client, seed, time.monotonic() + seconds, victims)
        await load_on.run()
        load_on.outcome.segments = len(segments(settings.deployment))
    load_on.outcome.left = segments(settings.deployment) + unfinished(root)
    return load_on.outcome


def unfinished(root: Path) -> list[str]:
    """What dead writers have begun in the shared directory and a look at it an hour later does not remove."""
    for path in root.rglob(f"{TEMPORARY}*"):
        os.utime(path, (0, 0))
    for directory in (root / "shared").rglob("*"):
        MountedBlobs(directory, Files()).list("")
    return [str(path) for path in root.rglob(f"{TEMPORARY}*")]
