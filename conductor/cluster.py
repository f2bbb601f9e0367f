"""The composition root: every Ray call that starts, creates or finds something, and every collaborator of the live path.

A `Cluster` starts a local Ray or joins one, creates the Conductor and the workers as actors, in parallel, introduces them to
each other, and keeps it so: a lost worker is started again under its id and joins with a new epoch, and a Conductor that was
started again by Ray hears of all workers again. `stop` leaves nothing running, unless the cluster is detached. What the actors
do is not known here; see `runtime.py` and `workers/`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conductor.core.config import SchedulerConfig
from conductor.core.scheduler import Scheduler
from conductor.core.types import Role, WorkerId, WorkerSpec
from conductor.flight_log import RunDirectory
from conductor.policies_loader import load_policy
from conductor.runtime import ConductorRuntime, Ports

if TYPE_CHECKING:  # actors import this module, and need no configuration files, schemas or gateway
    from conductor.config import ClusterSection, Config, FlightLogSection

logger = logging.getLogger(__name__)

CONDUCTOR_NAME = "conductor"
CONDUCTOR_CONCURRENCY = 20_000  # submissions that wait for a decision each hold one call
WORKER_CONCURRENCY = 4_000
MAX_RESTART_DELAY_S = 30.0
MIB = 2**20

Progress = Callable[[str], None]


class ClusterError(RuntimeError):
    """The cluster cannot be started; the message is one line for people."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker to keep running: the class of its actor and what that is made from. `direct_transport`: it moves tensors
    through Ray itself."""

    id: WorkerId
    role: Role
    threads: int
    actor_class: type
    config: Any
    direct_transport: bool = False


class ConductorActor(ConductorRuntime):
    """The runtime as an actor: it builds its scheduler, and knows its own handle and what Ray's errors mean."""

    def __init__(self, config: SchedulerConfig, logs: RunDirectory | None) -> None:
        log = None if logs is None else logs.open_run(config)
        scheduler = Scheduler(config, policy=load_policy(config.policy))
        ports = Ports(is_worker_loss=is_worker_loss, on_fatal=_exit_process, stop_worker=_kill)
        super().__init__(scheduler, log, ports)

    async def join(self, spec: WorkerSpec, handle: Any) -> int:
        """`add_worker` with this actor as the one to report to."""
        import ray

        return await self.add_worker(spec, handle, ray.get_runtime_context().current_actor)

    async def pid(self) -> int:
        return os.getpid()


def _exit_process(error: Exception) -> None:
    """End the actor's process, so that Ray starts it again with a scheduler that is consistent."""
    os._exit(1)


def is_worker_loss(error: BaseException) -> bool:
    """Whether a call failed because its target is gone, rather than because the target could not do it (its own peer being
    gone included)."""
    from ray.exceptions import RayActorError, RayTaskError

    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


def flight_log_runs(section: FlightLogSection) -> RunDirectory | None:
    """Where runs are recorded; None when they are not."""
    if not section.enabled:
        return None
    return RunDirectory(
        section.directory or default_flight_log_directory(), section.segment_mib * MIB, section.max_segments, section.keep_runs
    )


def default_flight_log_directory() -> Path:
    """$XDG_STATE_HOME/kv-conductor/flight, else ~/.local/state/kv-conductor/flight."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "kv-conductor" / "flight"


def plan_workers(config: Config) -> list[WorkerPlan]:
    """The workers that the configuration asks for: `prefill-0`, `prefill-1`, ..., `decode-0`, ... Raises `ClusterError`."""
    from workers.decode import DecodeWorker
    from workers.prefill import PrefillWorker

    section = config.workers
    prefill = [_plan(config, Role.PREFILL, number, PrefillWorker) for number in range(section.prefill)]
    decode = [_plan(config, Role.DECODE, number, DecodeWorker) for number in range(section.decode)]
    return prefill + decode


def _plan(config: Config, role: Role, number: int, actor_class: type) -> WorkerPlan:
    from workers.config import WorkerConfig
    from workers.kv_transfer.throttled import LinkLimit

    section, worker_id = config.workers, f"{role.value}-{number}"
    try:
        worker_config = WorkerConfig(
            worker_id=worker_id,
            role=role,
            model=config.model.name,
            num_blocks=section.prefill_blocks if role is Role.PREFILL else section.decode_blocks,
            block_tokens=config.scheduler.block_tokens,
            chunk_tokens=section.chunk_tokens,
            max_batch=section.max_batch,
            threads=section.threads,
            device=section.device,
            compute_dtype=config.model.compute_dtype,
            kv_dtype=config.model.kv_dtype,
            transport=section.transport,
            link=LinkLimit(section.link_gbps, section.link_latency_ms),
        )
    except ValueError as error:
        raise ClusterError(f"workers: {error}") from None
    return WorkerPlan(worker_id, role, section.threads, actor_class, worker_config, "rdt_" in section.transport)


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
        self._progress(f"starting the Conductor and {len(self._plans)} workers")
        self._conductor = self._create_conductor()
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

        if not self.config.cluster.detached:
            for handle in self._handles.values():
                ray.kill(handle)
            if self._conductor is not None:
                ray.kill(self._conductor)
        ray.shutdown()
        self._connected = False

    # --- actors -------------------------------------------------------------------------------------------------------

    def _cpus(self) -> int:
        workers = self.config.workers
        return self.config.cluster.num_cpus or max(1, (workers.prefill + workers.decode) * workers.threads)

    def _create_conductor(self) -> Any:
        import ray

        options = self._life() | {"name": CONDUCTOR_NAME, "namespace": self.config.cluster.namespace, "num_cpus": 0}
        options |= {"max_restarts": -1, "max_concurrency": CONDUCTOR_CONCURRENCY}
        try:
            actor = ray.remote(ConductorActor).options(**options)
            return actor.remote(self.config.scheduler, flight_log_runs(self.config.flight_log))
        except ValueError as error:
            raise ClusterError(f"an actor named {CONDUCTOR_NAME!r} is running in this Ray namespace already: {error}") from None

    def _create_worker(self, plan: WorkerPlan) -> Any:
        import ray

        options = self._life() | {"num_cpus": plan.threads, "max_concurrency": WORKER_CONCURRENCY, "max_restarts": 0}
        options |= {"scheduling_strategy": "SPREAD"}
        if self.config.cluster.address is not None:  # a local Ray has inherited it, which spares a slow set-up
            options |= {"runtime_env": {"env_vars": actor_environment(plan.threads)}}
        actor = (
            ray.remote(enable_tensor_transport=True)(plan.actor_class)
            if plan.direct_transport
            else ray.remote(plan.actor_class)
        )
        return actor.options(**options).remote(plan.config)

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
        await self.conductor.join.remote(spec, handle)
        self._progress(f"{plan.id} has joined")

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
            await _until_gone(self._handles[plan.id])
            _kill(self._handles[plan.id])
            if await self._retired(plan.id):
                logger.info("worker %s has been drained and is not started again", plan.id)
                self._specs.pop(plan.id, None)
                return
            if not section.restart_workers:
                logger.warning("worker %s is lost and is not started again (cluster.restart_workers is off)", plan.id)
                return
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
            await _until_gone(self.conductor)
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


async def _until_gone(handle: Any) -> None:
    """Wait until an actor's `alive()` ends, however it ends."""
    try:
        await handle.alive.remote()
    except Exception as error:
        logger.info("an actor is gone: %s", type(error).__name__)


def _kill(handle: Any) -> None:
    import ray

    ray.kill(handle)


def actor_environment(threads: int) -> dict[str, str]:
    """What every actor process finds in its environment."""
    return {"OMP_NUM_THREADS": str(threads), "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}


def connect(section: ClusterSection, num_cpus: int, environment: Mapping[str, str]) -> None:
    """Start a local Ray, whose processes inherit `environment`, or join the one at `section.address`. Raises `ClusterError`."""
    os.environ.update(environment)
    os.environ["RAY_AUTH_MODE"] = section.auth_mode
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # actors without a GPU see the devices that there are
    import ray

    options: dict[str, Any] = {"namespace": section.namespace, "log_to_driver": False, "logging_level": logging.WARNING}
    if section.address is None:
        options |= {"address": "local", "num_cpus": num_cpus, "include_dashboard": section.dashboard}
        options |= {"object_store_memory": section.object_store_mib * MIB}
    else:
        options |= {"address": section.address}
    try:
        ray.init(**options)
    except Exception as error:
        raise ClusterError(f"Ray did not start: {first_cause(error)}") from None


def find_conductor(section: ClusterSection) -> Any:
    """The Conductor's handle on a cluster that is joined already. Raises `ClusterError`."""
    import ray

    try:
        return ray.get_actor(CONDUCTOR_NAME, namespace=section.namespace)
    except ValueError:
        raise ClusterError(
            f"no actor {CONDUCTOR_NAME!r} in the Ray namespace {section.namespace!r}; start `conductor serve`"
        ) from None


def first_cause(error: BaseException) -> str:
    """One line for people: the message of the exception that began it, without Ray's wrapping."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return first_cause(cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
