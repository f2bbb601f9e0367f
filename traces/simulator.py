"""Replays a trace in virtual time: the real `conductor.core.Scheduler` over a simulated cluster.

Assembles loop, cluster and scheduler, feeds every arrival, hands events to the scheduler and its commands to the cluster,
and turns what happened into a `RunResult`. The scheduler sees what a live one would see: reports of workers, perhaps late;
never the ground truth, nor a request's true output length beyond the limit that its client set.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from conductor.core.commands import Command
from conductor.core.config import SchedulerConfig
from conductor.core.events import Event, RequestArrived, Tick
from conductor.core.placement import Policy
from conductor.core.scheduler import Scheduler
from conductor.core.types import InvariantError, Rejection, Request, Role, Tier, WorkerId, WorkerSpec
from traces.belief import fit_cost_profile
from traces.clusters.profile import ClusterProfile
from traces.outcomes import RunResult
from traces.schema import TraceRequest
from traces.sim.hindsight import Hindsight
from traces.sim.job import RequestRecord
from traces.sim.loop import At, EventLoop
from traces.sim.replicas import ReplicaLog
from traces.sim.results import collect
from traces.sim.watch import Watch
from traces.sim_workers import Answers, SimCluster, World

MAX_TICKS_AT_ONCE = 1000
Observer = Callable[[float, Event, Sequence[Command]], None]


@dataclass(frozen=True, slots=True)
class Outage:
    """A node that dies at `lost_s` and comes back, empty, at `back_s` (None: never)."""

    worker: WorkerId
    lost_s: float
    back_s: float | None = None

    def __post_init__(self) -> None:
        if self.back_s is not None and not self.back_s > self.lost_s:
            raise ValueError(f"back_s is {self.back_s}; allowed: a time after lost_s, {self.lost_s}")


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """What is simulated: the cluster, the decisions, and the world's accidents.

    `policy` places requests where the scheduler's configuration names a policy that is not the core's own.

    `load_reports_s` is how often workers report their load; None is never, since nothing runs on a simulated worker that its
    scheduler has not sent there. `count_replicas` looks now and then at which blocks lie on how many workers.
    """

    cluster: ClusterProfile
    prefill_workers: int = 8
    decode_workers: int = 8
    coupled_workers: int = 0
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speed: float = 1.0
    event_lag_s: float = 0.0
    load_reports_s: float | None = None
    outages: tuple[Outage, ...] = ()
    policy: Policy | None = None
    count_replicas: bool = False

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise ValueError(f"speed is {self.speed}; allowed: a number above 0")
        if self.event_lag_s < 0:
            raise ValueError(f"event_lag_s is {self.event_lag_s}; allowed: a number of at least 0")
        if self.load_reports_s is not None and not self.load_reports_s > 0:
            raise ValueError(f"load_reports_s is {self.load_reports_s}; allowed: a number above 0, or None")
        for name in ("prefill_workers", "decode_workers", "coupled_workers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: an integer of at least 0")
        stages = self.cluster.pipeline.stages
        if self.coupled_workers and stages > 1:
            raise ValueError(f"pipeline.stages is {stages} with coupled workers; allowed: 1, since they decode on one node")
        shared = self.cluster.processors
        if self.coupled_workers and shared is not None:
            raise ValueError(
                f"processors.count is {shared.count:g} with coupled workers; allowed: none, for they share an engine"
            )
        for work, workers in (("prefill", self.prefill_workers), ("decode", self.decode_workers)):
            if workers + self.coupled_workers < 1:
                raise ValueError(f"no worker to {work}; allowed: at least one {work} or coupled worker")


def simulate(
    trace: Iterable[TraceRequest],
    options: SimulationOptions,
    *,
    name: str = "trace",
    observer: Observer | None = None,
) -> RunResult:
    """Replay `trace`. `observer` sees every (time, event, commands), in order, as a flight log holds them."""
    with _reference_counts_only():
        simulation = Simulation(options, observer)
        simulation.feed(trace)
        simulation.run()
        return collect(name, simulation)


class Simulation:
    """One replay. `records` holds what happened to each request, in trace order."""

    def __init__(self, options: SimulationOptions, observer: Observer | None = None) -> None:
        self.options = options
        self.loop = EventLoop()
        self.records: dict[str, RequestRecord] = {}
        self.scheduler = Scheduler(options.scheduler, policy=options.policy)
        answers = Answers(self.loop.inbox.append, self._refused)
        world = World(options.event_lag_s, options.scheduler.seed)
        self.cluster = SimCluster(self.loop, options.cluster, self.records, answers, world)
        slo = options.scheduler.slo
        self.watch = Watch(
            self.loop,
            options.cluster.service_time(),
            self.cluster.workers,
            self.records,
            slo,
            options.load_reports_s,
        )
        self.watch.replicas = ReplicaLog() if options.count_replicas else None
        self.hindsight = Hindsight(options.cluster, self.cluster.workers, self.watch, slo)
        self._observer = observer
        self._tick_s: float | None = None
        self._last_tick_s = -1.0
        self._ticks_now = 0
        self._lives: Counter[str] = Counter()
        self._specs = {spec.id: spec for spec in worker_specs(options)}
        for spec in self._specs.values():
            self.cluster.join(spec, epoch=1)
            self._lives[spec.id] = 1
        for outage in options.outages:
            self._plan_outage(outage)

    def feed(self, trace: Iterable[TraceRequest]) -> None:
        """Take in every request of `trace`, before the run."""
        origin_s: float | None = None
        for index, row in enumerate(trace):
            origin_s = row.timestamp_s if origin_s is None else origin_s
            arrival_s = (row.timestamp_s - origin_s) / self.options.speed
            output_tokens = max(1, row.output_tokens)
            request = Request(
                id=f"{index:07d}",
                prompt_tokens=row.input_tokens,
                block_hashes=row.full_block_ids,
                max_output_tokens=output_tokens,
                traffic_class=row.traffic_class or "chat",
                session=row.session,
            )
            self.records[request.id] = RequestRecord(index, request, arrival_s, output_tokens)

    def run(self) -> None:
        """Let virtual time pass until nothing is left to happen."""
        self._drain()
        self._plan_arrival(iter(self.records.values()))
        self.watch.start()
        self.loop.run(self._drain)

    def _plan_arrival(self, coming: Iterator[RequestRecord]) -> None:
        """One at a time, so that what is planned stays few."""
        record = next(coming, None)
        if record is not None:
            self.loop.at(record.arrival_s, At.ARRIVAL, self._arrive, record, coming)

    def _arrive(self, record: RequestRecord, coming: Iterator[RequestRecord]) -> None:
        self.loop.inbox.append(RequestArrived(record.request))
        self._plan_arrival(coming)

    def _refused(self, record: RequestRecord, rejection: Rejection) -> None:
        self.hindsight.note(record, rejection, self.loop.now)

    def _drain(self) -> None:
        """Hand over every event of this moment, and carry out what the scheduler answers."""
        inbox, handle, execute, now = self.loop.inbox, self.scheduler.handle, self.cluster.execute, self.loop.now
        while inbox:
            event = inbox.popleft()
            commands = handle(event, now)
            if self._observer is not None:
                self._observer(now, event, commands)
            for command in commands:
                execute(command)
        self._plan_tick()

    def _plan_tick(self) -> None:
        deadline_s = self.scheduler.next_deadline()
        if deadline_s is None:
            return
        due_s = max(deadline_s, self.loop.now)
        if self._tick_s is None or due_s < self._tick_s:
            self._tick_s = due_s
            self.loop.at(due_s, At.TIMER, self._tick, due_s)

    def _tick(self, due_s: float) -> None:
        if self._tick_s != due_s:
            return
        self._tick_s = None
        self._ticks_now = self._ticks_now + 1 if due_s == self._last_tick_s else 0
        self._last_tick_s = due_s
        if self._ticks_now > MAX_TICKS_AT_ONCE:
            raise InvariantError(f"the scheduler asks for a tick at {due_s} s again and again; virtual time stands still")
        self.loop.inbox.append(Tick())

    def _plan_outage(self, outage: Outage) -> None:
        if outage.worker not in self._specs:
            raise ValueError(f"outage of {outage.worker!r}; allowed: one of {', '.join(self._specs)}")
        self._lives[outage.worker] += 1
        self.loop.at(outage.lost_s, At.COMPLETION, self.cluster.lose, outage.worker)
        if outage.back_s is not None:
            spec = self._specs[outage.worker]
            self.loop.at(outage.back_s, At.COMPLETION, self.cluster.join, spec, self._lives[outage.worker])


@contextmanager
def _reference_counts_only() -> Iterator[None]:
    """A run makes no cycles worth finding, and keeps much that a search for them would walk over again and again."""
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.enable()


def worker_specs(options: SimulationOptions) -> list[WorkerSpec]:
    """What the workers of a cluster say of themselves; each stands on a node of its own."""
    profile = fit_cost_profile(options.cluster)
    pools = (
        (Role.PREFILL, options.prefill_workers),
        (Role.DECODE, options.decode_workers),
        (Role.COUPLED, options.coupled_workers),
    )
    return [
        WorkerSpec(
            id=f"{role}-{number:03d}",
            role=role,
            node=f"{role}-{number:03d}",
            profile=profile,
            capacity_blocks={Tier.DEVICE: options.cluster.pool_blocks(prefill_only=role is Role.PREFILL)},
            nic_bytes_per_s=options.cluster.network.nic_bytes_per_s,
            max_batch=options.cluster.max_batch,
        )
        for role, count in pools
        for number in range(count)
    ]
