"""The composition root: every Ray call that starts, creates or finds something, and every collaborator of the live path.

A `Cluster` starts a local Ray or joins one, creates the Conductor and the workers as actors, in parallel, introduces them to
each other, and keeps it so: a lost worker is started again under its id and joins with a new epoch, and a Conductor that was
started again by Ray hears of all workers again. With `cluster.attach` it adds its workers, or none, to a Conductor that runs
already, and takes them out again when it stops. `stop` leaves nothing running, unless the cluster is detached. What the actors
do is not known here; see `runtime.py` and `workers/`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conductor.connection import (
    CONDUCTOR_NAME,
    ClusterError,
    actor_environment,
    connect,
    find_conductor,
    first_cause,
    is_worker_loss,
    until_gone,
)
from conductor.core.config import SchedulerConfig, require_fit
from conductor.core.scheduler import Scheduler
from conductor.core.types import BlockHash, Role, WorkerId, WorkerSpec
from conductor.flight_log import RunDirectory, flight_log_runs
from conductor.node_demands import node_demand
from conductor.placing import Placing, WorkerPlan
from conductor.policies_loader import load_policy
from conductor.runtime import ConductorRuntime, Ports

if TYPE_CHECKING:  # actors import this module, and need no configuration files, schemas or gateway
    from conductor.config import Config
    from workers.kv_store.settings import StoreSettings

logger = logging.getLogger(__name__)

CONDUCTOR_CONCURRENCY = 20_000  # submissions that wait for a decision each hold one call
MAX_RESTART_DELAY_S = 30.0
LEAVE_POLL_S = 0.2
CLOSE_TIMEOUT_S = 6.0

Progress = Callable[[str], None]


class ConductorActor(ConductorRuntime):
    """The runtime as an actor: it builds its scheduler, and knows its own handle and what Ray's errors mean."""

    def __init__(self, config: SchedulerConfig, logs: RunDirectory | None) -> None:
        log = None if logs is None else logs.open_run(config)
        scheduler = Scheduler(config, policy=load_policy(config.policy))
        self._config = config
        ports = Ports(is_worker_loss=is_worker_loss, on_fatal=_exit_process, stop_worker=_kill)
        super().__init__(scheduler, log, ports)

    async def join(self, spec: WorkerSpec, handle: Any) -> int:
        """`add_worker` with this actor as the one to report to. Raises ValueError for a worker that cannot belong here."""
        require_fit(spec, self._config)
        import ray

        return await self.add_worker(spec, handle, ray.get_runtime_context().current_actor)

    async def cache_command(self, action: str, name: BlockHash | None) -> dict[WorkerId, Any]:
        """What every worker answers to an operator's question about its tiers."""
        return await self._calls.ask_everybody(lambda handle: handle.cache_command.remote(action, name))

    async def pid(self) -> int:
        return os.getpid()


def _exit_process(error: Exception) -> None:
    """End the actor's process, so that Ray starts it again with a scheduler that is consistent."""
    os._exit(1)


def plan_workers(config: Config) -> list[WorkerPlan]:
    """The workers that the configuration asks for: `prefill-0`, `prefill-1`, ..., `decode-0`, ... Raises `ClusterError`; where
    all run on this machine, for processors that it does not have too."""
    from workers.remote import DecodeWorker, PrefillWorker

    section, store = config.workers, _store_settings(config)
    prefill = [_plan(config, store, Role.PREFILL, number, PrefillWorker) for number in range(section.prefill)]
    decode = [_plan(config, store, Role.DECODE, number, DecodeWorker) for number in range(section.decode)]
    return prefill + decode


def _store_settings(config: Config) -> StoreSettings:
    """The tiers of every worker. Raises `ClusterError`."""
    from workers.kv_store.settings import settings_from

    try:
        return settings_from(config.store.model_dump(), config.cluster.namespace)
    except ValueError as error:
        raise ClusterError(f"store: {error}") from None


def _plan(config: Config, store: StoreSettings, role: Role, number: int, actor_class: type) -> WorkerPlan:
    from workers.config import WorkerConfig
    from workers.kv_transfer.throttled import LinkLimit
    from workers.processors import processors_for

    section = config.workers
    worker_id = f"{section.id_prefix}{role.value}-{number}"
    stages = section.stages[number] if role is Role.PREFILL else 1
    first = sum(section.stages[:number]) if role is Role.PREFILL else sum(section.stages) + number
    try:
        worker_config = WorkerConfig(
            worker_id=worker_id,
            role=role,
            model=config.model.name,
            num_blocks=section.prefill_blocks if role is Role.PREFILL else section.decode_blocks,
            block_tokens=config.scheduler.block_tokens,
            chunk_tokens=section.chunk_tokens,
            max_batch=section.max_batch,
            speculative_tokens=section.speculative_tokens,
            threads=section.threads,
            cpus=section.cpus_of(range(first, first + stages)),
            device=section.device,
            compute_dtype=config.model.compute_dtype,
            kv_dtype=config.model.kv_dtype,
            weights=config.model.weights,
            transport=section.transport,
            link=LinkLimit(section.link_gbps, section.link_latency_ms),
            transport_codec=section.transport_codec,
            profile_budget_s=section.profile_budget_s,
            store=store,
            stages=stages,
        )
        if config.cluster.address is None:
            for cpus in worker_config.cpus:
                processors_for(cpus, section.threads)
    except ValueError as error:
        raise ClusterError(f"workers: {error}") from None
    direct = "rdt_" in section.transport
    return WorkerPlan(worker_id, role, section.threads, actor_class, worker_config, direct, worker_config.stages)


def stored_blocks(directory: Path, *, payloads: bool) -> Iterator[Any]:
    """The records of a store directory that no worker need have open; see `workers/kv_store/inspection.py`."""
    from workers.kv_store.inspection import stored_blocks

    return stored_blocks(directory, payloads=payloads)


def usable_transports(config: Config) -> str:
    """The transports that workers would have on this machine, and what `auto` leaves out. Raises `ClusterError` for one that is
    asked for by name and cannot work here."""
    from workers.assembly import PROBE
    from workers.kv_transfer.select import AUTOMATIC, absent_transports

    named = config.workers.transport
    try:
        absent = absent_transports(named, PROBE)
    except ValueError as error:
        raise ClusterError(f"workers: {error}") from None
    reasons = "; ".join(absent.values())
    if absent and named != AUTOMATIC:
        raise ClusterError(f"workers.transport is {named!r}, and {reasons}")
    return f"{named}, without {', '.join(absent)} ({reasons})" if absent else named


def profile_worker(config: Config, *, fresh: bool) -> dict[str, Any]:
    """The fitted cost profile of a prefill worker of this configuration, measured in this process. Raises `ClusterError`,
    `ModelError` or `ValueError`."""
    section = config.workers
    (plan, *_) = plan_workers(config)
    connect(config.cluster, max((1, *section.stages)) * section.threads, actor_environment(section.threads))
    from workers.assembly import profile_worker  # imports Ray, which then no longer looks at the environment

    return asdict(profile_worker(_with_stages(plan, Placing(config, [plan], {})), fresh=fresh))


def _with_stages(plan: WorkerPlan, placing: Placing) -> Any:
    """What the worker's actor is made from, the terms of its later stages included."""
    return replace(plan.config, stage_options=placing.stage_options(plan)) if plan.stages > 1 else plan.config


class Cluster:
    """Ray, the Conductor and the workers of one deployment: `connect`, `start`, and `stop` whatever happened."""

    def __init__(self, config: Config, progress: Progress = lambda line: None) -> None:
        self.config = config
        self._plans: list[WorkerPlan] = []
        self._progress = progress
        self._conductor: Any | None = None
        self._handles: dict[WorkerId, Any] = {}
        self._specs: dict[WorkerId, WorkerSpec] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._placing = Placing(config, (), {})
        self._connected = False

    def handle(self, worker_id: WorkerId) -> Any:
        """The actor handle of a worker's current life. Raises KeyError for an unknown worker."""
        return self._handles[worker_id]

    @property
    def conductor(self) -> Any:
        """The Conductor's actor handle."""
        if self._conductor is None:
            raise ClusterError("the cluster has not been started")
        return self._conductor

    def connect(self) -> None:
        """Start or join Ray; blocks. In the main thread only, and Ray takes the signal handlers. Raises `ClusterError`."""
        address = self.config.cluster.address
        self._progress("starting Ray" if address is None else f"joining Ray at {address}")
        connect(self.config.cluster, self._cpus(), actor_environment(self.config.workers.threads))
        self._connected = True

    async def start(self, plans: list[WorkerPlan]) -> None:
        """After `connect`: return when every worker has joined. Raises `ClusterError`."""
        self._plans = plans
        attach = self.config.cluster.attach
        self._progress(f"{'joining' if attach else 'starting'} the Conductor and starting {len(self._plans)} workers")
        self._conductor = find_conductor(self.config.cluster) if attach else self._create_conductor()
        self._placing = Placing(self.config, self._plans, self._life())
        self._handles = {plan.id: self._create_worker(plan) for plan in self._plans}
        await self._in_time(asyncio.gather(*(self._join(plan) for plan in self._plans)))
        self._tasks = [asyncio.create_task(self._supervise_conductor())]
        self._tasks += [asyncio.create_task(self._supervise(plan)) for plan in self._plans]

    async def stop(self) -> None:
        """End what `start` has started. A detached cluster goes on without its supervisor."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._connected:
            return
        import ray

        section = self.config.cluster
        if section.attach and not section.detached:
            await self._leave()
        if not section.detached:
            await asyncio.gather(*(self._close_worker(handle) for handle in self._handles.values()))
            for handle in self._handles.values():
                ray.kill(handle)
            if self._conductor is not None and not section.attach:
                ray.kill(self._conductor)
        ray.shutdown()
        self._connected = False

    async def _leave(self) -> None:
        """Let the attached workers finish what they have; what is left after a while goes on elsewhere."""
        until_s = time.monotonic() + self.config.cluster.leave_timeout_s
        try:
            for worker_id in self._handles:
                await self.conductor.drain_worker.remote(worker_id)
            while time.monotonic() < until_s and _busy(await self.conductor.status.remote(), self._handles):
                await asyncio.sleep(LEAVE_POLL_S)
        except Exception as error:
            logger.warning("the workers leave at once: %s", first_cause(error))

    # --- actors -------------------------------------------------------------------------------------------------------

    def _cpus(self) -> int:
        workers = self.config.workers
        return self.config.cluster.num_cpus or max(1, workers.actors * workers.threads)

    def _create_conductor(self) -> Any:
        import ray

        options = self._life() | {"name": CONDUCTOR_NAME, "namespace": self.config.cluster.namespace, "num_cpus": 0}
        options |= {"max_restarts": -1, "max_concurrency": CONDUCTOR_CONCURRENCY}
        options |= node_demand(self.config.cluster.conductor_resources, self.config.cluster.conductor_labels).options()
        try:
            actor = ray.remote(ConductorActor).options(**options)
            return actor.remote(self.config.scheduler, flight_log_runs(self.config.flight_log))
        except ValueError as error:
            raise ClusterError(f"an actor named {CONDUCTOR_NAME!r} is running in this Ray namespace already: {error}") from None

    def _create_worker(self, plan: WorkerPlan) -> Any:
        import ray

        direct = ray.remote(enable_tensor_transport=True)  # type: ignore[call-overload]  # its annotations lack it
        actor = direct(plan.actor_class) if plan.direct_transport else ray.remote(plan.actor_class)
        return actor.options(**self._life(), **self._placing.options(plan)).remote(_with_stages(plan, self._placing))

    def _life(self) -> dict[str, Any]:
        return {"lifetime": "detached"} if self.config.cluster.detached else {}

    async def _join(self, plan: WorkerPlan) -> None:
        """Wait until the worker has loaded its model, and introduce it to the Conductor."""
        handle = self._handles[plan.id]
        try:
            spec: WorkerSpec = await handle.describe.remote()
        except Exception as error:
            raise ClusterError(f"worker {plan.id} did not start: {first_cause(error)}") from None
        self._specs[plan.id] = spec
        try:
            await self.conductor.join.remote(spec, handle)
        except ValueError as error:
            raise ClusterError(f"worker {plan.id} cannot belong to this cluster: {first_cause(error)}") from None
        self._progress(f"{plan.id} has joined")

    async def _close_worker(self, handle: Any) -> None:
        """Let a worker write what waits for its disk and give its host's memory back, if it can be reached."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await handle.close.remote()
        except Exception as error:
            logger.info("a worker did not close by itself: %s", type(error).__name__)

    async def _in_time(self, work: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
        try:
            async with asyncio.timeout(self.config.cluster.start_timeout_s):
                await work
        except TimeoutError:
            limit_s = self.config.cluster.start_timeout_s
            raise ClusterError(f"workers took longer than cluster.start_timeout_s = {limit_s:g} s to start") from None

    # --- supervision --------------------------------------------------------------------------------------------------

    async def _supervise(self, plan: WorkerPlan) -> None:
        """Start the worker again whenever it is lost, with growing pauses while it cannot start, unless it was drained."""
        section = self.config.cluster
        delay_s = section.restart_delay_s
        while True:
            await until_gone(self._handles[plan.id])
            _kill(self._handles[plan.id])
            if await self._retired(plan.id):
                logger.info("worker %s has been drained and is not started again", plan.id)
                self._specs.pop(plan.id, None)
                return
            if not section.restart_workers:
                logger.warning("worker %s is lost and is not started again (cluster.restart_workers is off)", plan.id)
                return
            self._progress(f"{plan.id} is lost; what it had goes on elsewhere, and it is started again")
            await asyncio.sleep(delay_s)
            self._handles[plan.id] = self._create_worker(plan)
            try:
                await self._in_time(self._join(plan))
                delay_s = section.restart_delay_s
            except Exception as error:
                logger.error("worker %s could not be started again: %s", plan.id, error)
                _kill(self._handles[plan.id])
                delay_s = min(MAX_RESTART_DELAY_S, 2 * max(delay_s, section.restart_delay_s))

    async def _retired(self, worker_id: WorkerId) -> bool:
        try:
            retired: bool = await self.conductor.retired.remote(worker_id)
        except Exception as error:
            logger.info("the Conductor does not say whether %s was drained: %s", worker_id, type(error).__name__)
            return False
        return retired

    async def _supervise_conductor(self) -> None:
        """Introduce the workers again whenever the Conductor's process was started again."""
        while True:
            await until_gone(self.conductor)
            logger.warning("the Conductor was lost; Ray starts it again")
            for plan in self._plans:
                spec = self._specs.get(plan.id)
                if spec is not None:
                    await self._rejoin(spec, self._handles[plan.id])

    async def _rejoin(self, spec: WorkerSpec, handle: Any) -> None:
        while True:
            try:
                await self.conductor.join.remote(spec, handle)
            except Exception as error:
                logger.info("the Conductor does not answer yet: %s", type(error).__name__)
                await asyncio.sleep(self.config.cluster.restart_delay_s)
            else:
                return


def _busy(status: Any, worker_ids: Mapping[WorkerId, Any]) -> bool:
    """Whether any of these workers still has requests, as the Conductor believes."""
    known = [status.workers[worker_id] for worker_id in worker_ids if worker_id in status.workers]
    return any(worker.get("prefill_jobs", 0) or worker.get("decode_requests", 0) for worker in known)


def _kill(handle: Any) -> None:
    import ray

    ray.kill(handle)
