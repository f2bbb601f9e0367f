"""Prefill and decode as Ray actors with the default model: KV over each transport, tokens through streaming generators."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from functools import cache
from typing import Any

import psutil
import pytest
import torch

from conductor.core.events import Event, HandoverFinished, PrefillFinished, RequestFailed, RequestFinished, TransferFinished
from conductor.core.hashing import KVNamespace, hash_blocks
from conductor.core.messages import GenerationJob, SamplingParams, TokenOutput
from conductor.core.types import Request, Role
from models.base import ForwardBatch, PagedKVCache
from models.folder import load_card
from models.load import load_model
from models.pull import DEFAULT_MODEL
from tests.workers.actor_doubles import CHANNEL, PROFILE, place
from tests.workers.doubles import packed
from workers.config import WorkerConfig
from workers.decode import DecodeWorker
from workers.kv_transfer.throttled import LinkLimit
from workers.prefill import PrefillWorker

pytestmark = [pytest.mark.live, pytest.mark.slow]
WAIT_S = 120.0
TOKENS = tuple(1000 + (7919 * i) % 40000 for i in range(150))


class Conductor:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def report(self, events: list[Event]) -> None:
        self.events += events

    async def told(self) -> list[Event]:
        return self.events


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "object_store"))


@pytest.fixture
def settings() -> dict[str, Any]:
    return {}


@pytest.fixture
def actors(local_ray: Any, transport: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    handles = {"conductor": local_ray.remote(Conductor).options(num_cpus=0).remote()}
    for worker_id, kind, role in (
        ("p0", PrefillWorker, Role.PREFILL),
        ("p1", PrefillWorker, Role.PREFILL),
        ("d0", DecodeWorker, Role.DECODE),
    ):
        config = WorkerConfig(
            worker_id=worker_id,
            role=role,
            model=DEFAULT_MODEL,
            num_blocks=24,
            chunk_tokens=64,
            profile=PROFILE,
            transport=transport,
            **settings,
        )
        actor = local_ray.remote(enable_tensor_transport="rdt_" in transport)(kind)
        handles[worker_id] = actor.options(num_cpus=0, max_concurrency=100).remote(config)
    yield handles
    for handle in handles.values():
        local_ray.kill(handle)


def job(request_id: str, tokens: tuple[int, ...] = TOKENS) -> GenerationJob:
    seed = KVNamespace(load_card(DEFAULT_MODEL).namespace, 64, salt="default").seed
    hashes = hash_blocks(seed, packed(tokens), 64)
    return GenerationJob(Request(request_id, len(tokens), hashes, 6), packed(tokens), SamplingParams(max_tokens=6), CHANNEL)


async def collect(handle: Any, into: list[TokenOutput]) -> None:
    async for pending in handle.outputs.remote(CHANNEL):
        into += await pending


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await condition():
            await asyncio.sleep(0.05)


REMOTE = {"object_store": "ray", "cma": "ctypes", "rdt_nixl": "nixl", "nixl": "nixl_cu12", "mooncake": "mooncake"}
"""Transports between processes, with the module that each needs."""

HERE = [name for name, module in REMOTE.items() if importlib.util.find_spec(module) is not None]


@cache
def uncached() -> list[int]:
    """What the default model answers to `TOKENS`, greedily, everything computed again for every token."""
    model, output = load_model(DEFAULT_MODEL).model, list[int]()
    for _ in range(6):
        tokens = [*TOKENS, *output]
        batch = ForwardBatch(torch.tensor(tokens), [len(tokens)], [0], [[0, 1, 2]])
        output.append(int(model.forward(batch, PagedKVCache(model.layout, 3, 64))[0].argmax()))
    return output


class Gateway:
    """Sends prompts, and reads what comes of them."""

    def __init__(self, actors: dict[str, Any]) -> None:
        self._actors = actors
        self._outputs: list[TokenOutput] = []
        self.readers = [asyncio.create_task(collect(actors[name], self._outputs)) for name in ("p0", "p1", "d0")]

    async def run(self, request_id: str, tokens: tuple[int, ...], prefill: str, source: str | None = None) -> list[TokenOutput]:
        work = job(request_id, tokens)
        placement = place(work, prefill, "d0", fetched=128 if source else 0, source=source)
        actors = self._actors
        await actors[prefill].prefill.remote(work, placement, actors["d0"], actors[source] if source else None)

        async def ended() -> bool:
            return any(o.request_id == request_id and o.finish_reason for o in self._outputs)

        await until(ended)
        return sorted((o for o in self._outputs if o.request_id == request_id), key=lambda o: o.index)


@pytest.mark.parametrize("transport", HERE, indirect=True)
async def test_requests_run_through_real_actors_on_every_transport(actors: dict[str, Any], transport: str) -> None:
    """Miss, hit, pull and cancel on a live cluster: the output of no cache each time, true reuse, nothing left pinned."""
    workers = [actors[name] for name in ("p0", "p1", "d0")]
    specs = await asyncio.gather(*(handle.describe.remote() for handle in workers))
    assert [spec.id for spec in specs] == ["p0", "p1", "d0"]
    await asyncio.gather(*(handle.attach.remote(actors["conductor"], 1) for handle in workers))
    gateway = Gateway(actors)
    miss = await gateway.run("miss", TOKENS, "p0")
    hit = await gateway.run("hit", TOKENS, "p0")
    pulled = await gateway.run("pull", TOKENS, "p1", "p0")
    assert [[output.token_id for output in answer] for answer in (miss, hit, pulled)] == [uncached()] * 3
    assert [answer[0].reused_tokens for answer in (miss, hit, pulled)] == [0, 128, 128]
    assert list((await actors["d0"].stats.remote())["protocols"]) == [transport]

    gone = job("gone", TOKENS[::-1])
    await actors["p0"].prefill.remote(gone, place(gone, "p0", "d0"), actors["d0"], None)
    await asyncio.gather(actors["p0"].cancel.remote("gone", 1), actors["d0"].cancel.remote("gone", 1))
    stats = [await until_nothing_is_held(handle) for handle in workers]
    assert [numbers["transport_fallbacks"] for numbers in stats] == [0, 0, 0]
    for reader in gateway.readers:
        reader.cancel()
    events = await actors["conductor"].told.remote()
    counts = [sum(isinstance(event, kind) for event in events) for kind in (PrefillFinished, HandoverFinished, RequestFinished)]
    assert counts == [3, 3, 3]
    assert not [event for event in events if isinstance(event, RequestFailed | TransferFinished)]


async def test_a_killed_decode_actor_fails_the_request(actors: dict[str, Any], local_ray: Any) -> None:
    """The prefill worker reports the request as failed, blames the dead peer, and keeps nothing."""
    await asyncio.gather(*(actors[name].describe.remote() for name in ("p0", "d0")))
    await actors["p0"].attach.remote(actors["conductor"], 1)
    local_ray.kill(actors["d0"])
    await actors["p0"].prefill.remote(job("r"), place(job("r"), "p0", "d0"), actors["d0"], None)

    async def failed() -> bool:
        events = await actors["conductor"].told.remote()
        return any(isinstance(event, RequestFailed) and event.worker_id == "d0" for event in events)

    await until(failed)
    stats = await actors["p0"].stats.remote()
    assert (stats["pinned_blocks"], stats["offers"], stats["running"]) == (0, 0, 0)


SLOWED = {"link": LinkLimit(latency_ms=700), "lease_s": 4.0}
"""Every part is under way for a while, and what is given up is given up soon."""


async def under_way(actors: dict[str, Any], request_id: str) -> None:
    """A prompt of several chunks, whose first parts are on their way to the decode worker."""
    await asyncio.gather(*(actors[name].describe.remote() for name in ("p0", "d0")))
    await asyncio.gather(*(actors[name].attach.remote(actors["conductor"], 1) for name in ("p0", "d0")))
    await actors["p0"].prefill.remote(job(request_id), place(job(request_id), "p0", "d0"), actors["d0"], None)

    async def receiving() -> bool:
        stats = await actors["d0"].stats.remote()
        return bool(stats["queued"] and stats["pinned_blocks"])

    await until(receiving)


async def until_nothing_is_held(handle: Any) -> dict[str, Any]:
    async def idle() -> bool:
        stats = await handle.stats.remote()
        return stats["pinned_blocks"] == stats["offers"] == stats["queued"] == stats["running"] == 0

    await until(idle)
    stats: dict[str, Any] = await handle.stats.remote()
    return stats


@pytest.mark.parametrize("transport", ["object_store"], indirect=True)
@pytest.mark.parametrize("settings", [SLOWED], ids=["slowed"])
async def test_a_prefill_worker_that_dies_in_mid_transfer(actors: dict[str, Any], local_ray: Any) -> None:
    """The decode worker gives back what it had reserved, has kept nothing of the torn prompt, and answers the next one."""
    await under_way(actors, "torn")
    local_ray.kill(actors["p0"])
    stats = await until_nothing_is_held(actors["d0"])
    assert stats["cached_idle_blocks"] == 0
    await actors["p1"].attach.remote(actors["conductor"], 1)
    gateway = Gateway({**actors, "p0": actors["p1"]})
    assert len(await gateway.run("next", TOKENS, "p1")) == 6
    for reader in gateway.readers:
        reader.cancel()


@pytest.mark.parametrize("transport", ["cma"], indirect=True)
@pytest.mark.parametrize("settings", [SLOWED], ids=["slowed"])
async def test_a_request_that_is_cancelled_in_mid_transfer(actors: dict[str, Any]) -> None:
    """Both sides let go of everything, and no block of it can be reused on the decode side."""
    await under_way(actors, "gone")
    await asyncio.gather(actors["p0"].cancel.remote("gone", 1), actors["d0"].cancel.remote("gone", 1))
    await until_nothing_is_held(actors["p0"])
    assert (await until_nothing_is_held(actors["d0"]))["cached_idle_blocks"] == 0


@pytest.mark.parametrize("transport", ["cma"], indirect=True)
async def test_a_worker_in_stages_is_one_among_real_actors(actors: dict[str, Any], local_ray: Any, transport: str) -> None:
    """Miss, hit, a pull from the stages and one to them: the output of no cache each time. They end with the first one."""
    config = WorkerConfig(
        worker_id="g0",
        role=Role.PREFILL,
        model=DEFAULT_MODEL,
        num_blocks=24,
        chunk_tokens=64,
        profile=PROFILE,
        transport=transport,
        stages=2,
        stage_options=({"num_cpus": 0, "max_concurrency": 100},),
    )
    staged = local_ray.remote(PrefillWorker).options(num_cpus=0, max_concurrency=100).remote(config)
    actors = {**actors, "g0": staged, "p0": staged}
    await asyncio.gather(*(actors[name].describe.remote() for name in ("g0", "p1", "d0")))
    gateway = Gateway(actors)
    for name, prefill, source, reused in (
        ("miss", "g0", None, 0),
        ("hit", "g0", None, 128),
        ("from", "p1", "g0", 128),
    ):
        answer = await gateway.run(name, TOKENS, prefill, source)
        assert ([output.token_id for output in answer], answer[0].reused_tokens) == (uncached(), reused)
    other = TOKENS[::-1]
    computed = await gateway.run("other", other, "p1")
    pulled = await gateway.run("to", other, "g0", "p1")
    assert [output.token_id for output in pulled] == [output.token_id for output in computed]
    assert pulled[0].reused_tokens == 128
    for name in ("g0", "p1", "d0"):
        await until_nothing_is_held(actors[name])
    for reader in gateway.readers:
        reader.cancel()
    (stage,) = stage_processes()
    local_ray.kill(staged)
    await asyncio.to_thread(stage.wait, WAIT_S)


def stage_processes() -> list[psutil.Process]:
    """Of the Ray that this process has started."""
    processes = psutil.Process().children(recursive=True)
    return [process for process in processes if "".join(process.cmdline()[:1]).startswith("ray::PrefillStage")]
