"""The control path on a real local Ray, with workers that compute nothing: joining, losing, resuming, restarting, leaving."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from conductor.cluster import Cluster, WorkerPlan
from conductor.config import Config, load
from conductor.connection import ClusterError
from conductor.core.config import SchedulerConfig
from conductor.core.messages import GenerationJob, SamplingParams, TokenOutput
from conductor.core.scheduler import Scheduler
from conductor.core.types import FinishReason, Placement, Rejection, RejectReason, Request, Role
from conductor.engine_client import ClusterStatus
from conductor.flight_log import verify
from conductor.ray_engine_client import RayEngineClient
from tests.live.stand_in_workers import BLOCK_TOKENS, StandInConfig, StandInWorker, expected_tokens

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


HELD_FIRST, LEAVING_FIRST = 500, 600
HELD_BLOCKS = 100_000


def hash_prompt(tokens: bytes, tenant: str) -> tuple[int, ...]:
    size = 4 * BLOCK_TOKENS
    return tuple(hash((tenant, tokens[:end])) & (2**64 - 1) for end in range(size, len(tokens) + 1, size))


def known_blocks(first: int) -> tuple[int, ...]:
    """Of the prompts that begin with it."""
    return hash_prompt(struct.pack("<9i", first, *range(1, 9)), "default")


def indexed(status: ClusterStatus) -> dict[str, int]:
    """How many blocks the index has of each worker."""
    return {worker_id: int(worker.get("indexed_blocks", 0)) for worker_id, worker in status.workers.items()}


def config(tmp_path: Path) -> Config:
    flags = {
        "cluster.object_store_mib": 100,
        "cluster.restart_delay_s": 0.2,
        "cluster.num_cpus": 4,
        "cluster.auth_mode": os.environ["RAY_AUTH_MODE"],
        "scheduler.block_tokens": BLOCK_TOKENS,
        "flight_log.directory": str(tmp_path),
    }
    return load(None, {}, flags).config


def plan(worker_id: str, role: Role, **options: Any) -> WorkerPlan:
    return WorkerPlan(worker_id, role, 1, StandInWorker, StandInConfig(worker_id, role, **options))


class Deployment:
    """A running cluster and a client of it."""

    def __init__(self, cluster: Cluster, client: RayEngineClient, log_directory: Path) -> None:
        self.cluster, self.client, self.log_directory = cluster, client, log_directory
        self._count = 0

    def job(self, first: int, max_tokens: int, prompt_tokens: int = 9) -> GenerationJob:
        self._count += 1
        tokens = struct.pack(f"<{prompt_tokens}i", first, *range(1, prompt_tokens))
        request = Request(f"r{self._count}", prompt_tokens, hash_prompt(tokens, "default"), max_tokens)
        return GenerationJob(request, tokens, SamplingParams(max_tokens), self.client.channel)

    async def generate(
        self, job: GenerationJob, on_output: Callable[[TokenOutput], Any] = lambda output: None
    ) -> list[TokenOutput]:
        assert isinstance(await self.client.submit(job), Placement)
        outputs = []
        async for output in self.client.outputs(job.request.id):
            outputs.append(output)
            on_output(output)
        return outputs

    async def placement_of(self, job: GenerationJob) -> Placement:
        """Where a request went; its output is read to the end."""
        placement = await self.client.submit(job)
        assert isinstance(placement, Placement)
        async for _ in self.client.outputs(job.request.id):
            pass
        return placement

    async def kill(self, worker_id: str) -> None:
        os.kill(await self.cluster.handle(worker_id).pid.remote(), signal.SIGKILL)

    async def until(self, condition: Callable[[Any], bool]) -> Any:
        """The first status that fulfils the condition."""
        async with asyncio.timeout(60):
            while not condition(status := await self.client.status()):
                await asyncio.sleep(0.05)
            return status

    async def settled(self) -> Any:
        """The status once nothing is in flight and every worker is back."""
        return await self.until(lambda status: status.counters.get("in_flight") == 0 and len(status.workers) == 3)


@pytest.fixture(scope="module")
def log_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flight")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(log_directory: Path) -> AsyncIterator[Deployment]:
    others = tuple(range(1, HELD_BLOCKS // 2))
    plans = [
        plan("prefill-0", Role.PREFILL, holds=(*known_blocks(LEAVING_FIRST), *others)),
        plan("prefill-1", Role.PREFILL, holds=(*known_blocks(HELD_FIRST), *others)),
        plan("decode-0", Role.DECODE),
    ]
    cluster = Cluster(config(log_directory))
    client: RayEngineClient | None = None
    others_before = ray_processes()  # of a service that other tests ask
    try:
        cluster.connect()
        await cluster.start(plans)
        client = RayEngineClient(cluster.conductor, hash_prompt)
        await client.start()
        yield Deployment(cluster, client, log_directory)
    finally:
        if client is not None:
            await client.close()
        await cluster.stop()
    assert ray_processes() <= others_before


def ray_processes() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True) if "ray" in one.name().lower()}


def tokens_of(outputs: list[TokenOutput]) -> list[int | None]:
    return [output.token_id for output in outputs]


async def test_a_request_streams_through_both_workers(deployment: Deployment) -> None:
    """The first token comes from a prefill worker, the rest from the decode worker."""
    outputs = await deployment.generate(deployment.job(3, 6))
    assert tokens_of(outputs) == expected_tokens(3, 6)
    assert outputs[0].worker.startswith("prefill-")
    assert {output.worker for output in outputs[1:]} == {"decode-0"}
    assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_many_requests_at_once_keep_apart(deployment: Deployment) -> None:
    """Thirty streams, each with its own tokens."""
    results = await asyncio.gather(*(deployment.generate(deployment.job(first, 5)) for first in range(30)))
    assert [tokens_of(outputs) for outputs in results] == [expected_tokens(first, 5) for first in range(30)]
    await deployment.settled()


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_killed_worker_goes_unnoticed_by_the_reader(deployment: Deployment, role: str) -> None:
    """SIGKILL in the middle of a stream: every token once, in order, and the service is whole again without a restart."""
    await deployment.settled()
    kills: list[asyncio.Task[None]] = []
    job = deployment.job(5, 40)

    def kill_once(output: TokenOutput) -> None:
        if output.index == (10 if role == "decode" else 0):
            victim = output.worker
            kills.append(asyncio.create_task(deployment.kill(victim)))

    outputs = await deployment.generate(job, kill_once)
    assert tokens_of(outputs) == expected_tokens(5, 40)
    assert [output.index for output in outputs] == list(range(40))
    assert len(kills) == 1
    await deployment.settled()


async def test_without_a_decode_worker_requests_are_refused_until_it_is_back(deployment: Deployment) -> None:
    """The refusal has a reason, and recovery needs nobody."""
    await deployment.settled()
    await deployment.kill("decode-0")
    status = await deployment.until(lambda status: not status.ready)
    assert status.reason == "no decode worker"
    decision = await deployment.client.submit(deployment.job(1, 2))
    assert isinstance(decision, Rejection)
    assert decision.reason is RejectReason.NO_DECODE
    await deployment.until(lambda status: status.ready)
    assert tokens_of(await deployment.generate(deployment.job(1, 2))) == expected_tokens(1, 2)


async def test_cancel_stops_the_workers(deployment: Deployment) -> None:
    """A client that leaves does not keep a worker busy."""
    await deployment.settled()
    job = deployment.job(2, 10_000)
    await deployment.client.submit(job)
    async for output in deployment.client.outputs(job.request.id):
        if output.index == 3:
            break
    await deployment.client.cancel(job.request.id)
    await deployment.settled()
    async with asyncio.timeout(20):
        while await deployment.cluster.handle("decode-0").running.remote():
            await asyncio.sleep(0.05)


async def test_two_gateways_share_one_conductor(deployment: Deployment) -> None:
    """Each channel receives its own tokens."""
    other = RayEngineClient(deployment.cluster.conductor, hash_prompt)
    await other.start()
    second = Deployment(deployment.cluster, other, deployment.log_directory)
    second._count = 10_000
    results = await asyncio.gather(deployment.generate(deployment.job(8, 5)), second.generate(second.job(9, 5)))
    await other.close()
    assert [tokens_of(outputs) for outputs in results] == [expected_tokens(8, 5), expected_tokens(9, 5)]


async def test_the_conductor_comes_back_with_its_workers(deployment: Deployment) -> None:
    """A killed Conductor is started again by Ray, hears of all workers again, and serves."""
    await deployment.settled()
    os.kill(await deployment.cluster.conductor.pid.remote(), signal.SIGKILL)
    await deployment.until(lambda status: status.ready and status.counters["workers_lost"] == 0 and len(status.workers) == 3)
    assert tokens_of(await deployment.generate(deployment.job(6, 4))) == expected_tokens(6, 4)


async def test_a_conductor_that_comes_back_knows_all_caches(deployment: Deployment) -> None:
    """The index is rebuilt from snapshots of 100,000 blocks before it calls itself ready: nothing is expected of a worker that
    it does not hold."""
    holds = indexed(await deployment.settled())
    assert sum(holds.values()) >= HELD_BLOCKS
    os.kill(await deployment.cluster.conductor.pid.remote(), signal.SIGKILL)
    status = await deployment.until(lambda status: status.ready and status.counters["workers_lost"] == 0)
    assert indexed(status) == holds
    placed = await deployment.placement_of(deployment.job(HELD_FIRST, 2))
    assert placed.reuse.reused_tokens == 2 * BLOCK_TOKENS
    source = placed.reuse.source
    assert "prefill-1" in (placed.prefill, source.owner if source else None)  # computes where the prefix lies, or pulls it
    strange = await deployment.placement_of(deployment.job(HELD_FIRST + 1, 2))
    assert strange.reuse.reused_tokens == 0


async def test_the_flight_logs_of_all_this_verify(deployment: Deployment) -> None:
    """Kills, refusals and cancellations included, a fresh scheduler gives the identical commands."""
    await asyncio.sleep(1.2)
    await deployment.generate(deployment.job(1, 2))
    logs = sorted(deployment.log_directory.glob("*.flight.jsonl"))
    assert len(logs) == 3  # the Conductor's lives
    verification = verify(logs[0], SchedulerConfig, Scheduler)
    assert verification.difference is None
    assert verification.records > 100


async def test_a_drained_worker_finishes_and_is_not_started_again(deployment: Deployment) -> None:
    """`conductor drain`: what it was doing ends as it would have, new work goes elsewhere, and nobody brings it back. The other
    worker is given the prefix that it alone had."""
    await deployment.placement_of(deployment.job(LEAVING_FIRST, 2))
    holds = indexed(await deployment.settled())
    first = asyncio.create_task(deployment.generate(deployment.job(4, 100)))
    drain = await conductor_command("drain", "prefill-0", "--address", ray_address())
    _, told = await drain.communicate()
    assert (drain.returncode, "prefill-0 has stopped" in told.decode()) == (0, True), told.decode()
    assert tokens_of(await first) == expected_tokens(4, 100)
    status = await deployment.until(lambda status: "prefill-0" not in status.workers)
    assert indexed(status)["prefill-1"] == holds["prefill-1"] + len(known_blocks(LEAVING_FIRST))
    assert await deployment.cluster.conductor.retired.remote("prefill-0")
    placed = await deployment.placement_of(deployment.job(5, 2))
    assert placed.prefill == "prefill-1"
    await asyncio.sleep(1.0)
    assert "prefill-0" not in (await deployment.client.status()).workers
    unknown = await conductor_command("drain", "nobody", "--address", ray_address())
    _, told = await unknown.communicate()
    assert (unknown.returncode, "'nobody' is not known" in told.decode()) == (2, True), told.decode()


def ray_address() -> str:
    import ray  # not before `connect` has settled how it authenticates

    return str(ray.get_runtime_context().gcs_address)


async def conductor_command(*arguments: str) -> asyncio.subprocess.Process:
    piped = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "conductor", *arguments, stdout=piped, stderr=piped)


async def test_a_worker_that_cannot_start_is_one_line(tmp_path: Path, deployment: Deployment) -> None:
    """The message is the worker's own, without the layers that carried it."""
    broken = Cluster(deployment.cluster.config)
    broken_plan = plan("prefill-9", Role.PREFILL, fails_to_start=True)
    broken._handles["prefill-9"] = broken._create_worker(broken_plan)
    with pytest.raises(ClusterError, match=r"^worker prefill-9 did not start: .*the weights file is damaged$"):
        await broken._join(broken_plan)
