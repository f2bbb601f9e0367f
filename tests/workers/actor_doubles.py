"""Workers without Ray: handles that call plain objects, a Conductor that records, and a small cluster over loopback."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from conductor.core.cost_profile import CostProfile
from conductor.core.events import Event
from conductor.core.hashing import hash_blocks
from conductor.core.messages import GenerationJob, SamplingParams, TokenOutput
from conductor.core.types import Holder, Placement, Request, ReusePlan, Role, Tier, TTFTEstimate
from tests.workers.doubles import BLOCK_TOKENS, ROOT, ChainModel, packed
from workers.actor import WorkerActor
from workers.assembly import Build, WorkerParts, make_cache, node_of
from workers.config import WorkerConfig
from workers.decode import DecodeWorker
from workers.engine import Engine
from workers.kv_store.base import BlockFormat
from workers.kv_store.opening import open_tiers
from workers.kv_transfer.loopback import Fabric, LoopbackTransport
from workers.prefill import PrefillWorker

E = TypeVar("E")
CHANNEL = "gateway"
WAIT_S = 20.0
ESTIMATE = TTFTEstimate(0.0, 0.0, 0.0, 0.0, 0.0, calibrated=False)
PROFILE = CostProfile(0.01, 0.001, 0.0, 0.01, 0.001, 0.0, kv_bytes_per_token=32, block_tokens=BLOCK_TOKENS)


class PeerDied(Exception):
    """What a call to a dead actor raises."""


class Handle:
    """`handle.method.remote(...)` on a plain object. `dead` makes every call fail, `hang` makes calls of one method wait."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.dead = False
        self.hang: set[str] = set()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)

    async def call(self, name: str, args: tuple[Any, ...]) -> Any:
        self.calls.append(name)
        if self.dead:
            raise PeerDied(f"{name}: the actor is dead")
        if name in self.hang:
            await asyncio.Event().wait()
        return await getattr(self._target, name)(*args)


class _Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle = handle
        self._name = name

    def remote(self, *args: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(self._handle.call(self._name, args))


class RecordingConductor:
    def __init__(self) -> None:
        self.events: list[Event] = []

    async def report(self, events: Sequence[Event]) -> None:
        self.events += events

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


@dataclass
class Cluster:
    """Workers of one process, their handles, one Conductor, and the outputs of one gateway by request."""

    fabric: Fabric = field(default_factory=dict)
    conductor: RecordingConductor = field(default_factory=RecordingConductor)
    workers: dict[str, Any] = field(default_factory=dict)
    handles: dict[str, Handle] = field(default_factory=dict)
    outputs: dict[str, list[TokenOutput]] = field(default_factory=dict)
    readers: list[asyncio.Task[None]] = field(default_factory=list)

    async def add(
        self,
        worker_id: str,
        *,
        model: ChainModel | None = None,
        read: bool = True,
        build: Build | None = None,
        namespace: str = "chain",
        **changes: Any,
    ) -> Any:
        kind = PrefillWorker if worker_id.startswith("p") else DecodeWorker
        config = worker_config(worker_id, **changes)
        worker = kind(config, build or loopback_parts(self.fabric, model, namespace))
        self.workers[worker_id] = worker
        self.handles[worker_id] = Handle(worker)
        await worker.attach(Handle(self.conductor), 1)
        if read:
            self.readers.append(asyncio.create_task(self.read(worker)))
        return worker

    async def read(self, worker: WorkerActor) -> None:
        async for batch in worker.outputs(CHANNEL):
            for output in batch:
                self.outputs.setdefault(output.request_id, []).append(output)

    async def submit(self, job: GenerationJob, placement: Placement) -> None:
        reuse = placement.reuse
        source = self.handles.get(reuse.relay or reuse.source.owner) if reuse.source else None
        decode = None if placement.decode is None else self.handles[placement.decode]
        await self.workers[placement.prefill].prefill(job, placement, decode, source)

    async def output_of(self, request_id: str) -> list[int | None]:
        """Token ids in order of their index, once the last one has come."""
        await until(lambda: any(o.finish_reason is not None for o in self.outputs.get(request_id, ())))
        ordered = sorted(self.outputs[request_id], key=lambda o: o.index)
        return [output.token_id for output in ordered]

    async def close(self) -> None:
        """Everything has been given back by the time the workers stop."""
        try:
            for worker in self.workers.values():
                await until(lambda worker=worker: worker.cache.pinned == 0)
                worker.cache.check()
                assert worker.transport.offered == 0
            await until(lambda: not self.fabric)
        finally:
            for reader in self.readers:
                reader.cancel()
            for worker in self.workers.values():
                await worker.close()


def worker_config(worker_id: str, **changes: Any) -> WorkerConfig:
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    settings: dict[str, Any] = {
        "worker_id": worker_id,
        "role": role,
        "model": "chain",
        "num_blocks": 64,
        "block_tokens": BLOCK_TOKENS,
        "chunk_tokens": 8,
        "max_batch": 8,
        "transport": "loopback",
        "report_interval_s": 0.05,
        "lease_s": 20.0,
    }
    return WorkerConfig(**(settings | changes))


def loopback_parts(fabric: Fabric, model: ChainModel | None = None, namespace: str = "chain") -> Build:
    def build(config: WorkerConfig) -> WorkerParts:
        loaded = model or ChainModel()
        engine = Engine(loaded, make_cache(config, loaded.layout))
        tiers = open_tiers(config.store, BlockFormat(namespace, engine.cache.kv), node_of(config))
        transports = {"loopback": LoopbackTransport(engine.cache.kv, fabric)}
        return WorkerParts(engine, transports, PROFILE, "chain", lambda tenant: ROOT, tiers)

    return build


def make_job(
    request_id: str, tokens: Sequence[int], max_tokens: int = 8, *, emitted: int = 0, attempt: int = 1
) -> GenerationJob:
    request = Request(
        id=request_id,
        prompt_tokens=len(tokens),
        block_hashes=hash_blocks(ROOT, packed(tokens), BLOCK_TOKENS),
        max_output_tokens=max_tokens - emitted,
        attempt=attempt,
        emitted_tokens=emitted,
    )
    return GenerationJob(request, packed(tokens), SamplingParams(max_tokens=max_tokens), CHANNEL)


def with_sampling(job: GenerationJob, **changes: Any) -> GenerationJob:
    return dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, **changes))


def place(
    job: GenerationJob,
    prefill: str,
    decode: str | None = None,
    *,
    fetched: int = 0,
    source: str | None = None,
    tier: Tier = Tier.DEVICE,
    relay: str | None = None,
) -> Placement:
    holder = None if source is None else Holder(source, tier)
    reuse = ReusePlan(fetched_tokens=fetched, source=holder, relay=relay)
    return Placement(job.request.id, job.request.attempt, prefill, decode, reuse, ESTIMATE, None)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that must come true."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)
