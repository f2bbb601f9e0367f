"""Gateway, Conductor and workers over several Ray nodes: serve, lose a node in mid-stream, go on, take a new one in.

The nodes are `ray.cluster_utils` nodes on this machine; the workers compute nothing (see `stand_in_workers.py`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import ray
from ray.cluster_utils import Cluster as RayCluster

from conductor.cluster import Cluster
from conductor.config import load
from conductor.core.events import RequestFailed
from conductor.core.messages import TokenOutput
from conductor.core.types import Role
from conductor.ray_engine_client import RayEngineClient
from tests.live.stand_in_workers import BLOCK_TOKENS, expected_tokens
from tests.live.test_cluster import Deployment, hash_prompt, plan, tokens_of
from tests.workers.actor_doubles import make_job
from tests.workers.test_live_losses import Cast
from tests.workers.worker_stage import OTHER, PROMPT
from workers.kv_transfer.throttled import LinkLimit

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

FOUR = [
    plan("prefill-0", Role.PREFILL),
    plan("prefill-1", Role.PREFILL),
    plan("decode-0", Role.DECODE),
    plan("decode-1", Role.DECODE),
]


class Nodes:
    """A Ray cluster whose head runs the Conductor, and others that come and go."""

    def __init__(self) -> None:
        os.environ["RAY_AUTH_MODE"] = "disabled"
        self.ray = RayCluster(
            initialize_head=True,
            head_node_args={"num_cpus": 4, "labels": {"part": "head"}, "object_store_memory": 100 * 2**20},
        )
        self.others: list[Any] = []

    def add(self) -> None:
        self.others.append(
            self.ray.add_node(
                num_cpus=4, resources={"worker_node": 2}, labels={"part": "other"}, object_store_memory=100 * 2**20
            )
        )

    def lose(self) -> None:
        self.ray.remove_node(self.others.pop(), allow_graceful=False)


def flags(nodes: Nodes, log_directory: Path, **more: Any) -> dict[str, Any]:
    return {
        "cluster.address": nodes.ray.address,
        "cluster.restart_delay_s": 0.2,
        "cluster.conductor_labels": ["part=head"],
        "scheduler.block_tokens": BLOCK_TOKENS,
        "flight_log.directory": str(log_directory),
        **more,
    }


@pytest.fixture(scope="module")
def nodes() -> Any:
    started = Nodes()
    started.add()
    yield started
    ray.shutdown()
    started.ray.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    """Two workers on each node."""
    log_directory = tmp_path_factory.mktemp("flight")
    cluster = Cluster(load(None, {}, flags(nodes, log_directory)).config)
    cluster.connect()
    await cluster.start(FOUR)
    client = RayEngineClient(cluster.conductor, hash_prompt)
    await client.start()
    yield Deployment(cluster, client, log_directory)
    await client.close()
    await cluster.stop()


async def node_of(handle: Any) -> str:
    def where(_: Any) -> str:
        return str(ray.get_runtime_context().get_node_id())

    return str(await handle.__ray_call__.remote(where))


async def idle(deployment: Deployment, lost: int = 0) -> bool:
    """Nothing is in flight, and so many workers have been lost so far."""
    status = await deployment.client.status()
    return status.ready and status.counters["in_flight"] == 0 and status.counters["workers_lost"] >= lost


async def complete(deployment: Deployment) -> bool:
    return await idle(deployment) and len((await deployment.client.status()).workers) == len(FOUR)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(90):
        while not await condition():
            await asyncio.sleep(0.2)


async def test_the_workers_are_spread_and_the_conductor_is_where_its_label_is(deployment: Deployment, nodes: Nodes) -> None:
    """Both nodes have two workers; the Conductor is on the head."""
    found = [await node_of(deployment.cluster.handle(one.id)) for one in FOUR]
    assert sorted(found.count(node) for node in set(found)) == [2, 2]
    assert await node_of(deployment.cluster.conductor) == nodes.ray.head_node.node_id


async def test_a_lost_node_is_not_noticed_by_the_readers(deployment: Deployment, nodes: Nodes) -> None:
    """The node is taken away while eight streams run, some of them on it: every token comes once, in order."""
    lost: list[asyncio.Task[None]] = []

    def lose_once(output: TokenOutput) -> None:
        if output.index == 5 and not lost:
            lost.append(asyncio.create_task(asyncio.to_thread(nodes.lose)))

    firsts = range(20, 28)
    results = await asyncio.gather(*(deployment.generate(deployment.job(first, 60), lose_once) for first in firsts))
    assert [tokens_of(outputs) for outputs in results] == [expected_tokens(first, 60) for first in firsts]
    assert len(lost) == 1
    await lost[0]
    await eventually(lambda: idle(deployment, lost=2))  # some may be back already, on the node that is left


async def test_a_node_that_joins_gets_the_lost_workers(deployment: Deployment, nodes: Nodes) -> None:
    """Nothing was restarted by hand."""
    nodes.add()  # Ray takes signal handlers, in the main thread only
    await eventually(lambda: complete(deployment))
    assert tokens_of(await deployment.generate(deployment.job(3, 5))) == expected_tokens(3, 5)


async def test_others_attach_to_the_conductor_and_leave_without_a_trace(deployment: Deployment, nodes: Nodes) -> None:
    """A second gateway with a worker of its own, in a placement group on a node with a certain resource."""
    more = {"cluster.attach": True, "workers.layout": "strict_pack", "workers.decode_resources": ["worker_node=1"]}
    second = Cluster(load(None, {}, flags(nodes, deployment.log_directory, **more)).config)
    second._connected = False  # this process has joined Ray already
    newcomer = replace(plan("decode-9", Role.DECODE))
    await second.start([newcomer])
    status = await deployment.client.status()
    assert "decode-9" in status.workers
    assert await node_of(second.handle("decode-9")) != nodes.ray.head_node.node_id
    other = RayEngineClient(second.conductor, hash_prompt)
    await other.start()
    theirs = Deployment(second, other, deployment.log_directory)
    theirs._count = 50_000
    firsts = range(40, 52)
    streams = [
        (deployment if first % 2 else theirs).generate((deployment if first % 2 else theirs).job(first, 30)) for first in firsts
    ]
    running = asyncio.gather(*streams)
    await asyncio.sleep(0.3)
    await second._leave()
    assert [tokens_of(outputs) for outputs in await running] == [expected_tokens(first, 30) for first in firsts]
    status = await deployment.client.status()
    assert (status.workers["decode-9"]["draining"], status.workers["decode-9"]["decode_requests"]) == (True, 0)
    await other.close()
    for task in second._tasks:
        task.cancel()
    ray.kill(second.handle("decode-9"))
    await eventually(lambda: complete(deployment))


async def test_a_new_version_serves_beside_the_old_one_until_that_is_drained(deployment: Deployment, nodes: Nodes) -> None:
    """Two deployments in two namespaces of one Ray cluster; the one that ends takes nothing of the other with it."""
    config = load(None, {}, flags(nodes, deployment.log_directory, **{"cluster.namespace": "next"})).config
    newer = Cluster(config)
    await newer.start([plan("prefill-0", Role.PREFILL), plan("decode-0", Role.DECODE)])
    client = RayEngineClient(newer.conductor, hash_prompt)
    await client.start()
    theirs = Deployment(newer, client, deployment.log_directory)
    results = await asyncio.gather(deployment.generate(deployment.job(8, 20)), theirs.generate(theirs.job(9, 20)))
    assert [tokens_of(outputs) for outputs in results] == [expected_tokens(8, 20), expected_tokens(9, 20)]
    await client.close()
    for task in newer._tasks:
        task.cancel()
    for handle in (newer.handle("prefill-0"), newer.handle("decode-0"), newer.conductor):
        ray.kill(handle)
    assert await complete(deployment)
    assert tokens_of(await deployment.generate(deployment.job(4, 5))) == expected_tokens(4, 5)


async def test_a_host_whose_agent_dies_takes_nothing_with_it_that_others_hold(
    deployment: Deployment, nodes: Nodes, tmp_path: Path
) -> None:
    """The raylet is killed, and all workers of its node with it, while they give a prefix, are given a copy and a prompt's KV:
    the prefix is computed, the prompt fails on its decode worker, and the node that is left holds nothing for them."""
    near, far = ({"label_selector": {"part": part}} for part in ("head", "other"))
    cast = Cast(ray, tmp_path, LinkLimit(latency_ms=1500), 8.0, **near)
    await asyncio.gather(
        *(cast.start(name, **near) for name in ("p1", "d0")), *(cast.start(name, **far) for name in ("p0", "d1"))
    )
    await asyncio.gather(cast.begin("far", PROMPT, "p0"), cast.begin("near", OTHER, "p1"))
    await asyncio.gather(cast.answer("far", PROMPT), cast.answer("near", OTHER))
    await cast.nothing_is_left_of_it()
    lost = cast.workers["p0"].pull_blocks.remote("copy-1", cast.workers["p1"], make_job("r", OTHER).request.block_hashes)
    await cast.begin("torn", OTHER[::-1], "p1", "d1")
    await cast.begin("pulled", PROMPT, "p1", fetched=24, source="p0")
    await asyncio.gather(cast.shows("p0", "offers", 1), cast.shows("p1", "offers", 2), cast.shows("d1", "pinned_blocks", 1))
    nodes.others.pop().kill_raylet()
    del cast.workers["p0"], cast.workers["d1"]
    await cast.answer("pulled", PROMPT)
    await asyncio.gather(lost, return_exceptions=True)

    async def blamed() -> bool:
        return [(event.request_id, event.worker_id) for event in await cast.told(RequestFailed)] == [("torn", "d1")]

    await eventually(blamed)
    await cast.nothing_is_left_of_it()
    await cast.leave()
