"""The live driver: an inbox of events, `Scheduler.handle(event, monotonic time)`, and worker calls for its commands.

It decides nothing. One task takes events from the inbox one at a time, reads the clock once for each, and carries out the
commands in order; whatever a worker call comes to, good or bad, returns as another event, so no failure is swallowed. A timer
feeds `Tick` at the scheduler's deadline. Job payloads (tokens, sampling) stay here by request id, because the scheduler never
sees them, and go when the request ends.

Worker handles are Ray actor handles in production and plain doubles in tests: all that is used is
`await handle.method.remote(...)`. Design: DESIGN.md, "The life of a request" and "Actor protocol".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from conductor.core import commands as cmd
from conductor.core import events as ev
from conductor.core.commands import Command
from conductor.core.events import Event
from conductor.core.messages import GenerationJob
from conductor.core.types import Decision, Holder, RequestId, Tier, WorkerId, WorkerSpec
from conductor.draining import Drains
from conductor.engine_client import ClusterStatus
from conductor.flight_log import FlightLogWriter
from conductor.in_flight import InFlight
from conductor.mailbox import Mailbox
from conductor.notices import Notice, RejectionNotice, ResumeNotice, WorkerNotice
from conductor.readiness import Readiness
from conductor.scheduler_port import SchedulerPort
from conductor.worker_calls import Worker, WorkerCalls, no_event

logger = logging.getLogger(__name__)

LOG_FLUSH_INTERVAL_S = 1.0


class RequestCancelledError(Exception):
    """The request was cancelled before it was placed."""


class DuplicateRequestError(ValueError):
    """A request with this id is still in flight."""


class SchedulerStoppedError(RuntimeError):
    """The scheduler broke; nothing can be decided any more."""


@dataclass(frozen=True, slots=True)
class Ports:
    """What surrounds the runtime. `on_fatal` is called once, when the scheduler broke; `stop_worker` ends one's process."""

    clock: Callable[[], float] = time.monotonic
    is_worker_loss: Callable[[BaseException], bool] = lambda error: False
    on_fatal: Callable[[Exception], None] = lambda error: None
    stop_worker: Callable[[Any], None] = lambda handle: None


@dataclass(slots=True)
class Counters:
    events: int = 0
    commands: int = 0
    handle_s: float = 0.0
    handle_max_s: float = 0.0
    inbox_lag_max_s: float = 0.0
    workers_lost: int = 0
    flight_log_errors: int = 0


class ConductorRuntime:
    """Drives one scheduler. All methods run on one event loop; `stop` after the last call."""

    def __init__(self, scheduler: SchedulerPort, flight_log: FlightLogWriter | None = None, ports: Ports | None = None) -> None:
        self._scheduler, self._flight_log = scheduler, flight_log
        self._ports = ports or Ports()
        self._inbox: asyncio.Queue[tuple[float, Event]] = asyncio.Queue()
        self._calls = WorkerCalls(self._post, self._ports.is_worker_loss)
        self._in_flight = InFlight()
        self._readiness = Readiness()
        self._drains = Drains(self._ports.stop_worker, self._in_flight.uses)
        self._mailboxes: dict[str, Mailbox[Notice]] = {}
        self._counters = Counters()
        self._last_epoch = 0
        self._log_flushed_s = self._ports.clock()
        self._loop: asyncio.Task[None] | None = None
        self._fatal: SchedulerStoppedError | None = None
        self._carry_out: dict[type, Callable[[Any], None]] = {
            cmd.StartPrefill: self._start_prefill,
            cmd.StartDecode: self._start_decode,
            cmd.Reject: self._reject,
            cmd.Cancel: self._cancel,
            cmd.ResumeRequest: self._resume,
            cmd.TransferBlocks: self._transfer_blocks,
            cmd.DropBlocks: self._drop_blocks,
            cmd.RequestSnapshot: self._request_snapshot,
        }

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to take events; needs a running event loop. The first event does it by itself; again changes nothing."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._run())

    async def alive(self) -> None:
        """Never returns: its failure is the news that this process is gone."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """End every task of this runtime, let front ends go, and close the flight log."""
        await self._calls.stop()
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        self._in_flight.fail_all(SchedulerStoppedError("the Conductor is shutting down"))
        for mailbox in self._mailboxes.values():
            mailbox.close()
        if self._flight_log is not None:
            self._flight_log.close()
            self._flight_log = None

    # --- front ends ---------------------------------------------------------------------------------------------------

    async def submit(self, job: GenerationJob) -> Decision:
        """The decision on a request, late binding included."""
        request_id = job.request.id
        if request_id in self._in_flight:
            raise DuplicateRequestError(f"request id {request_id!r} is not allowed: a request with this id is in flight")
        return await self._await_decision(job, ev.RequestArrived(job.request))

    async def resume(self, job: GenerationJob) -> Decision:
        """The decision on the continuation of an interrupted request, which need not be known here: this process may have been
        started again, or the request may have ended before its output was complete."""
        return await self._await_decision(job, ev.RequestResumed(job.request))

    async def cancel(self, request_id: RequestId) -> None:
        """Stop a request everywhere. Unknown and finished requests are ignored."""
        if request_id in self._in_flight:
            self._post(ev.RequestCancelled(request_id))

    async def report(self, events: Sequence[Event]) -> None:
        """What a worker has to tell."""
        for event in events:
            self._post(event)

    async def report_lost_output(self, channel: str, failed: ev.RequestFailed) -> None:
        """A front end misses output of a worker that is gone. If the request has ended here, it is asked for the rest."""
        if failed.request_id in self._in_flight:
            self._post(failed)
        else:
            self._mailboxes.setdefault(channel, Mailbox()).put(ResumeNotice(failed.request_id, failed.attempt))

    async def notices(self, channel: str) -> AsyncIterator[list[Notice]]:
        """Notices for one front end, first a `WorkerNotice` for every worker. A second consumer takes the channel over."""
        previous = self._mailboxes.get(channel)
        mailbox: Mailbox[Notice] = Mailbox()
        self._mailboxes[channel] = mailbox
        for worker_id, worker in sorted(self._calls.workers.items()):
            mailbox.put(WorkerNotice(worker_id, worker.epoch, worker.handle))
        if previous is not None:
            mailbox.take_over(previous, lambda notice: not isinstance(notice, WorkerNotice))
        async for batch in mailbox.batches():
            yield batch

    async def decision(self, request_id: RequestId) -> Mapping[str, Any] | None:
        """The decision record as JSON values, or None when it is not known (any more)."""
        return self._scheduler.decision_record(request_id)

    async def overview(self) -> Mapping[str, Any]:
        """The last decisions and what the last requests add up to, as JSON values."""
        return self._scheduler.overview(self._ports.clock())

    async def status(self) -> ClusterStatus:
        """A picture of the cluster."""
        workers = dict(sorted(self._calls.workers.items()))
        unknown, now = self._scheduler.unknown_caches(), self._ports.clock()
        reason = str(self._fatal) if self._fatal else self._readiness.hindrance(workers.values(), unknown, now)
        belief = self._scheduler.worker_belief()
        counters = {name: float(value) for name, value in asdict(self._counters).items()}
        counters |= {"inbox": float(self._inbox.qsize()), "in_flight": float(len(self._in_flight))}
        counters["call_failures"] = float(self._calls.failures)
        return ClusterStatus(
            ready=reason is None,
            reason=reason or "serving",
            model=next((worker.spec.model for worker in workers.values()), ""),
            workers={worker_id: worker.describe() | dict(belief.get(worker_id, {})) for worker_id, worker in workers.items()},
            counters=counters,
        )

    # --- workers ------------------------------------------------------------------------------------------------------

    async def add_worker(self, spec: WorkerSpec, handle: Any, conductor: Any) -> int:
        """Begin a life of a worker: it joins, is told to report to `conductor` (this actor's handle), and is watched.

        Returns its epoch. Epochs come from the wall clock, so that they go on rising when this process is started again.
        """
        self._last_epoch = max(self._last_epoch + 1, time.time_ns() // 1_000_000)
        worker = Worker(spec, self._last_epoch, handle, self._ports.clock())
        previous = self._calls.workers.get(spec.id)
        if previous is not None:
            self._post(ev.WorkerLost(spec.id, previous.epoch))
        self._post(ev.WorkerJoined(spec, worker.epoch))
        self._calls.add(worker)
        self._calls.call(
            worker,
            lambda handle: handle.attach.remote(conductor, worker.epoch),
            lambda message: ev.WorkerLost(spec.id, worker.epoch),
        )
        self._tell_everybody(WorkerNotice(spec.id, worker.epoch, handle))
        return worker.epoch

    async def drain_worker(self, worker_id: WorkerId) -> None:
        """Give the worker no new work, and stop it when it has nothing left to do. Raises KeyError for an unknown worker."""
        worker = self._calls.workers[worker_id]
        if not worker.draining:
            self._calls.spawn(self._drains.finish(worker))
        worker.draining = True
        self._post(ev.WorkerDraining(worker_id))

    async def retired(self, worker_id: WorkerId) -> bool:
        """Whether it has been drained, so that nobody should start it again."""
        return worker_id in self._drains.retired

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        self.start()
        self._inbox.put_nowait((self._ports.clock(), event))

    async def _run(self) -> None:
        event: Event | None = None
        try:
            while True:
                event = await self._next_event(event)
                if self._step(event):
                    await asyncio.sleep(0)  # the calls go out before the next event is decided
        except Exception as error:
            self._stop_deciding(error)

    async def _next_event(self, last: Event | None) -> Event:
        """The next event, or a Tick when the deadline comes first; never two overdue Ticks before a waiting event."""
        deadline = self._scheduler.next_deadline()
        wait_s = None if deadline is None else max(0.0, deadline - self._ports.clock())
        if wait_s == 0.0 and not isinstance(last, ev.Tick):
            return ev.Tick()
        try:
            async with asyncio.timeout(wait_s):
                posted_s, event = await self._inbox.get()
        except TimeoutError:
            return ev.Tick()
        self._counters.inbox_lag_max_s = max(self._counters.inbox_lag_max_s, self._ports.clock() - posted_s)
        return event

    def _step(self, event: Event) -> list[Command]:
        if isinstance(event, ev.RequestResumed) and event.request.id not in self._in_flight:
            return []  # it was cancelled since it was posted
        now = self._ports.clock()
        commands = self._scheduler.handle(event, now)
        self._count(self._ports.clock() - now, len(commands))
        self._log(now, event, commands)
        self._observe(event)
        for command in commands:
            self._carry_out[type(command)](command)
        return commands

    def _count(self, handle_s: float, commands: int) -> None:
        self._counters.events += 1
        self._counters.commands += commands
        self._counters.handle_s += handle_s
        self._counters.handle_max_s = max(self._counters.handle_max_s, handle_s)

    def _log(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if self._flight_log is None:
            return
        try:
            self._flight_log.append(now, event, commands)
            if now - self._log_flushed_s >= LOG_FLUSH_INTERVAL_S:
                self._flight_log.flush()
                self._log_flushed_s = now
        except OSError as error:
            self._counters.flight_log_errors += 1
            logger.error("the flight log %s ends here: %s", self._flight_log.path, error)
            self._flight_log = None

    def _observe(self, event: Event) -> None:
        """What follows from an event for payloads and handles, before its commands are carried out."""
        self._drains.observe(event)
        if isinstance(event, ev.RequestFinished):
            self._in_flight.forget(event.request_id, event.attempt)
        elif isinstance(event, ev.RequestCancelled):
            self._in_flight.fail(event.request_id, RequestCancelledError(f"request {event.request_id!r} was cancelled"))
            self._in_flight.forget(event.request_id)
        elif isinstance(event, ev.WorkerLost):
            if self._calls.remove(event):
                self._counters.workers_lost += 1
                self._tell_everybody(WorkerNotice(event.worker_id, event.epoch, None))
        elif isinstance(event, ev.LoadReported) and event.worker_id in self._calls.workers:
            self._calls.workers[event.worker_id].hear(event)

    def _stop_deciding(self, error: Exception) -> None:
        logger.critical("the scheduler has stopped", exc_info=error)
        self._fatal = SchedulerStoppedError(f"the scheduler has stopped: {type(error).__name__}: {error}")
        self._in_flight.fail_all(self._fatal)
        self._ports.on_fatal(error)

    async def _await_decision(self, job: GenerationJob, event: Event) -> Decision:
        if self._fatal is not None:
            raise self._fatal
        decision = self._in_flight.begin(job)
        self._post(event)
        return await decision

    # --- commands -----------------------------------------------------------------------------------------------------

    def _start_prefill(self, command: cmd.StartPrefill) -> None:
        placement = command.placement
        job = self._in_flight.place(placement)
        if job is None:
            return  # it was cancelled meanwhile, and the cancellation is in the inbox
        decode = self._calls.handle_of(placement.decode)
        reuse = placement.reuse
        giver = self._calls.at(reuse.source) if reuse.source and reuse.relay is None else None
        source = self._calls.handle_of(reuse.relay) if giver is None else giver.handle
        self._calls.call_for_request(
            placement.prefill,
            placement.request_id,
            placement.attempt,
            lambda handle: handle.prefill.remote(job, placement, decode, source),
        )

    def _start_decode(self, command: cmd.StartDecode) -> None:
        placement = self._in_flight.placement(command.request_id)
        if placement is None:
            return  # as above
        decode = self._calls.handle_of(command.worker_id)
        self._calls.call_for_request(
            placement.prefill,
            command.request_id,
            command.attempt,
            lambda handle: handle.choose_decode.remote(command.request_id, command.attempt, command.worker_id, decode),
        )

    def _reject(self, command: cmd.Reject) -> None:
        rejection = command.rejection
        if not self._in_flight.decide(rejection.request_id, rejection):
            self._tell(rejection.request_id, RejectionNotice(rejection))
        self._in_flight.forget(rejection.request_id)

    def _cancel(self, command: cmd.Cancel) -> None:
        for worker_id in command.workers:
            worker = self._calls.workers.get(worker_id)
            if worker is not None:
                self._calls.call(worker, lambda handle: handle.cancel.remote(command.request_id, command.attempt), no_event)

    def _resume(self, command: cmd.ResumeRequest) -> None:
        self._tell(command.request_id, ResumeNotice(command.request_id, command.attempt))

    def _transfer_blocks(self, command: cmd.TransferBlocks) -> None:
        target, source = self._calls.at(command.target), self._calls.at(command.source)
        if target is None or source is None:
            gone = command.target.owner if target is None else command.source.owner
            self._post(ev.TransferFailed(command.transfer_id, f"no worker at {gone}"))
            return
        self._drains.transfer_began(command.transfer_id, source.spec.id)
        self._calls.call(
            target,
            lambda handle: handle.pull_blocks.remote(command.transfer_id, source.handle, command.blocks),
            lambda message: ev.TransferFailed(command.transfer_id, message),
        )

    def _drop_blocks(self, command: cmd.DropBlocks) -> None:
        worker = self._calls.at(command.holder)
        if worker is not None:
            self._calls.call(worker, lambda handle: handle.drop_blocks.remote(command.blocks), no_event)

    def _request_snapshot(self, command: cmd.RequestSnapshot) -> None:
        worker = self._calls.at(Holder(command.source, Tier.DEVICE))
        if worker is not None:
            self._calls.call(worker, lambda handle: handle.snapshot.remote(), no_event)

    # --- notices ------------------------------------------------------------------------------------------------------

    def _tell(self, request_id: RequestId, notice: Notice) -> None:
        job = self._in_flight.job(request_id)
        if job is not None:
            self._mailboxes.setdefault(job.channel, Mailbox()).put(notice)

    def _tell_everybody(self, notice: Notice) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.put(notice)
