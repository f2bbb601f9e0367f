"""`conductor demo migration`: a live demonstration, on this machine, of copies that are made ahead of demand.

The same load runs on two clusters that differ only in the replicator's budget. Each of several prefixes goes hot on one worker,
which then gets a long prompt; while it computes, short prompts with the prefix arrive and have to go elsewhere. Without
replication each of them waits for its prefix to be pulled over a slowed link; with it, the copy is there already. On a third
cluster, whose link is slower than computing, the same prompts are computed again instead of pulled, and the decision records
say what a pull would have taken. Nothing is simulated but the speed of the links, which is labelled as such. The tiers below
the device caches are off, for workers of one host share them and would have nothing to pull.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from conductor.cluster import Cluster, Progress, plan_workers
from conductor.config import Config
from conductor.core.config import MigrationConfig
from conductor.core.messages import GenerationJob, SamplingParams
from conductor.core.types import FinishReason, Placement, Request
from conductor.ray_engine_client import RayEngineClient
from conductor.serve import Prepared, prepare_model

FAST_LINK_GBPS = 0.25
SLOW_LINK_GBPS = 0.02
REPLICATION = MigrationConfig(budget_bytes_per_s=200e6, interval_s=0.25, heat_half_life_s=60.0, min_heat=2.0)
COPY_WAIT_S = 20.0
OCCUPY_TRIES = 6
LESSONS = 4
DOMAIN = "default"


class DemoFailed(RuntimeError):
    """The cluster did not do what was to be shown; the message says what."""


@dataclass(frozen=True, slots=True)
class Load:
    """`prefixes` of `prefix_tokens` go hot by `warming` prompts each; then `burst` prompts come while a long one computes."""

    prefixes: int = 4
    prefix_tokens: int = 1024
    long_tokens: int = 2048
    tail_tokens: int = 32
    warming: int = 4
    burst: int = 2


@dataclass(frozen=True, slots=True)
class Sent:
    request_id: str
    began_s: float
    placement: Placement


@dataclass(frozen=True, slots=True)
class Answer:
    request_id: str
    ttft_s: float
    placement: Placement


@dataclass(slots=True)
class Phase:
    """What one cluster showed. `copied_blocks` lay on other workers before any burst prompt was sent."""

    name: str
    link_gbps: float
    bursts: list[Answer] = field(default_factory=list)
    records: list[Mapping[str, Any]] = field(default_factory=list)
    copied_blocks: int = 0

    @property
    def p90_s(self) -> float:
        return float(np.percentile([answer.ttft_s for answer in self.bursts], 90))

    @property
    def pulls(self) -> int:
        return sum(record["reuse"]["fetched_tokens"] > 0 for record in self.records)

    def elsewhere(self) -> list[Mapping[str, Any]]:
        """Decisions whose worker neither held the prefix nor pulled it, although another one had it."""
        return [record for record in self.records if _computed_again(record)]


def _computed_again(record: Mapping[str, Any]) -> bool:
    chosen = next(row for row in record["candidates"] if row["chosen"])
    return bool(chosen.get("pull_tokens", 0)) and not chosen["fetched_tokens"]


@dataclass(frozen=True, slots=True)
class Migration:
    """The three phases, and what must be seen in them."""

    demand: Phase
    ahead: Phase
    slow: Phase

    def problems(self) -> list[str]:
        found = []
        if not self.ahead.copied_blocks:
            found.append("no replica appeared before it was asked for")
        if self.ahead.p90_s >= self.demand.p90_s:
            found.append(f"TTFT p90 is {self.ahead.p90_s:.2f} s with replication and {self.demand.p90_s:.2f} s without")
        if not self.slow.elsewhere():
            found.append("over the slow link nothing was computed again instead of pulled")
        return found


async def migration(config: Config, load: Load, progress: Progress) -> Migration:
    """Run the three clusters one after the other. Raises `ModelError`, `ClusterError`, `DemoFailed`."""
    prepared = prepare_model(config)
    phases = []
    for name, link_gbps, rules, prefixes in (
        ("copies on demand", FAST_LINK_GBPS, MigrationConfig(), load.prefixes),
        ("copies ahead of demand", FAST_LINK_GBPS, REPLICATION, load.prefixes),
        ("a link slower than computing", SLOW_LINK_GBPS, MigrationConfig(), 1),
    ):
        progress(f"{name}: link slowed to {link_gbps:g} Gbit/s, replication {'on' if rules.budget_bytes_per_s else 'off'}")
        phases.append(Phase(name, link_gbps))
        shown = _configured(config, link_gbps, rules)
        await _on_cluster(shown, prepared, progress, partial(_Run.all, phase=phases[-1], load=load, prefixes=prefixes))
    return Migration(*phases)


def _configured(config: Config, link_gbps: float, rules: MigrationConfig) -> Config:
    workers = config.workers.model_copy(update={"prefill": 2, "decode": 1, "link_gbps": link_gbps, "link_latency_ms": 1.0})
    scheduler = replace(config.scheduler, migration=rules, admission="none")
    flight_log = config.flight_log.model_copy(update={"enabled": False})
    store = config.store.model_copy(update={"host_mib": 0, "disk_directory": None, "shared_paths": ()})
    return config.model_copy(update={"workers": workers, "scheduler": scheduler, "flight_log": flight_log, "store": store})


async def _on_cluster(config: Config, prepared: Prepared, progress: Progress, body: Callable[[_Run], Awaitable[None]]) -> None:
    cluster = Cluster(config, progress)
    client: RayEngineClient | None = None
    try:
        cluster.connect()
        await cluster.start(plan_workers(config))
        client = RayEngineClient(cluster.conductor, prepared.hash_prompt)
        await client.start()
        await body(_Run(cluster, client, prepared, config.scheduler.migration.budget_bytes_per_s > 0))
    finally:
        if client is not None:
            await client.close()
        await cluster.stop()


class _Run:
    """The load on one cluster."""

    def __init__(self, cluster: Cluster, client: RayEngineClient, prepared: Prepared, replicates: bool) -> None:
        self._cluster = cluster
        self._client = client
        self._prepared = prepared
        self._replicates = replicates
        self._draw = random.Random(0)
        self._numbers = 0

    async def all(self, phase: Phase, load: Load, prefixes: int) -> None:
        for _ in range(LESSONS):  # first calls are slow; the estimates of both workers are to be right before anything is shown
            await asyncio.gather(*(self._ask(self._tokens(300)) for _ in range(2)))
        for _ in range(prefixes):
            await self._one_prefix(phase, load)

    async def _one_prefix(self, phase: Phase, load: Load) -> None:
        prefix, copied, busy = await self._occupied(load)
        phase.copied_blocks += copied
        bursts = await asyncio.gather(*(self._ask(prefix + self._tokens(load.tail_tokens)) for _ in range(load.burst)))
        await busy
        phase.bursts += bursts
        for answer in bursts:
            record = await self._client.decision(answer.request_id)
            if record is not None:
                phase.records.append(record)

    async def _occupied(self, load: Load) -> tuple[list[int], int, asyncio.Task[Answer]]:
        """A hot prefix, the blocks of it that were copied, and the long prompt that now computes where it is held.

        With copies any worker holds it. Without, a long prompt may go where it is not held but estimates are lower. It takes a
        copy along, so another prefix is warmed. Raises `DemoFailed`.
        """
        for _ in range(OCCUPY_TRIES):
            prefix = self._tokens(load.prefix_tokens)
            holder = (await self._ask(prefix + self._tokens(load.tail_tokens))).placement.prefill
            other = next(worker for worker in ("prefill-0", "prefill-1") if worker != holder)
            before = await self._cached_blocks(other)
            for _ in range(load.warming):
                await self._ask(prefix + self._tokens(load.tail_tokens))
            copied = await self._wait_for_copy(other, before) if self._replicates else 0
            sent = await self._send(prefix + self._tokens(load.long_tokens))
            answer = asyncio.create_task(self._first_token(sent))
            if copied or sent.placement.prefill == holder:
                await asyncio.sleep(0.3)
                return prefix, copied, answer
            await answer
        raise DemoFailed(f"none of {OCCUPY_TRIES} long prompts went to the worker that held the prefix they began with")

    async def _wait_for_copy(self, worker: str, before: int) -> int:
        """Blocks that came to a worker which nobody has asked anything of meanwhile."""
        began_s = perf_counter()
        while perf_counter() - began_s < COPY_WAIT_S:
            came = await self._cached_blocks(worker) - before
            if came > 0:
                return came
            await asyncio.sleep(0.1)
        return 0

    async def _cached_blocks(self, worker: str) -> int:
        stats: Mapping[str, Any] = await self._cluster.handle(worker).stats.remote()
        return int(stats["cached_idle_blocks"])

    async def _ask(self, tokens: Sequence[int]) -> Answer:
        return await self._first_token(await self._send(tokens))

    async def _send(self, tokens: Sequence[int]) -> Sent:
        """One token is all that is asked for: no KV goes to the decode worker."""
        self._numbers += 1
        packed = np.asarray(tokens, dtype="<i4").tobytes()
        hashes = self._prepared.hash_prompt(packed, DOMAIN)
        request = Request(f"demo-{self._numbers}", len(tokens), hashes, 1)
        began_s = perf_counter()
        decision = await self._client.submit(GenerationJob(request, packed, SamplingParams(max_tokens=1), self._client.channel))
        if not isinstance(decision, Placement):
            raise DemoFailed(f"a prompt was refused: {decision.reason.value}")
        return Sent(request.id, began_s, decision)

    async def _first_token(self, sent: Sent) -> Answer:
        ttft_s: float | None = None
        async for output in self._client.outputs(sent.request_id):
            ttft_s = perf_counter() - sent.began_s if ttft_s is None else ttft_s
            if output.finish_reason is FinishReason.FAILED:
                raise DemoFailed(f"a prompt failed: {output.message}")
        assert ttft_s is not None
        return Answer(sent.request_id, ttft_s, sent.placement)

    def _tokens(self, count: int) -> list[int]:
        """Ordinary tokens; special ones have low ids."""
        return [self._draw.randrange(1000, 40_000) for _ in range(count)]
