"""The lives of workers as the live driver sees them: their handles, the calls made to them, and the watch over each.

A failed call always comes back as an event: the loss of the worker, or what its caller made of the message. `alive()` of
every worker is awaited, and when it ends, however it ends, the worker is lost. What tells a lost worker from a failed call
is injected, so this module does not know Ray: a handle is anything whose `handle.method.remote(...)` can be awaited.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from conductor.core.events import Event, LoadReported, RequestFailed, WorkerLost
from conductor.core.types import Holder, RequestId, TierReport, WorkerId, WorkerLoad, WorkerSpec

logger = logging.getLogger(__name__)

Call: TypeAlias = Callable[[Any], Awaitable[Any]]
"""Makes a call on a worker's handle."""

OnFailure: TypeAlias = Callable[[str], Event | None]
"""The event that tells of a call that failed with this message, if there is any."""


@dataclass(slots=True)
class Worker:
    """One life of a worker."""

    spec: WorkerSpec
    epoch: int
    handle: Any
    joined_s: float
    load: WorkerLoad = field(default_factory=WorkerLoad)
    tiers: tuple[TierReport, ...] = ()
    draining: bool = False

    def hear(self, event: LoadReported) -> None:
        """Take in how the worker is doing; a tier that begins to fail is news for people."""
        known = {report.tier: report.failure for report in self.tiers}
        for report in event.tiers:
            if report.failure is not None and known.get(report.tier) != report.failure:
                logger.error("worker %s, %s tier: %s", self.spec.id, report.tier.name.lower(), report.failure)
        self.load, self.tiers = event.load, event.tiers

    def describe(self) -> dict[str, Any]:
        """The worker as JSON values."""
        return {
            "role": self.spec.role.value,
            "node": self.spec.node,
            "model": self.spec.model,
            "epoch": self.epoch,
            "draining": self.draining,
            "calibrated": self.spec.profile.calibrated,
            "capacity_blocks": {tier.name.lower(): blocks for tier, blocks in self.spec.capacity_blocks.items()},
            **asdict(self.load),
            **{name: value for report in self.tiers for name, value in tier_figures(report).items()},
        }


def tier_figures(report: TierReport) -> dict[str, Any]:
    """A tier's numbers under its name, and whether and why it fails."""
    name = report.tier.name.lower()
    numbers = {f"{name}_{figure}": value for figure, value in asdict(report).items() if figure not in ("tier", "failure")}
    return numbers | {f"{name}_failed": int(report.failure is not None), f"{name}_failure": report.failure}


def no_event(message: str) -> None:
    """For advice and clean-up: a failure is logged and counted, and changes nothing that the scheduler believes."""


class WorkerCalls:
    """Current workers by id. `post` takes the events that calls come to."""

    def __init__(self, post: Callable[[Event], None], is_worker_loss: Callable[[BaseException], bool]) -> None:
        self.failures = 0
        self.workers: dict[WorkerId, Worker] = {}
        self._post = post
        self._is_worker_loss = is_worker_loss
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, worker: Worker) -> None:
        self.workers[worker.spec.id] = worker
        self.spawn(self._watch(worker))

    def remove(self, event: WorkerLost) -> bool:
        """Forget the worker, unless a later life of it has begun; tells whether it was there."""
        worker = self.workers.get(event.worker_id)
        if worker is None or worker.epoch != event.epoch:
            return False
        del self.workers[event.worker_id]
        return True

    def at(self, holder: Holder) -> Worker | None:
        """The worker whose pool this is, or for a node's store the first worker of that node that has it."""
        if holder.owner in self.workers:
            return self.workers[holder.owner]
        of_node = (worker for _, worker in sorted(self.workers.items()) if worker.spec.node == holder.owner)
        return next((worker for worker in of_node if holder.tier in worker.spec.capacity_blocks), None)

    def handle_of(self, worker_id: WorkerId | None) -> Any | None:
        worker = None if worker_id is None else self.workers.get(worker_id)
        return None if worker is None else worker.handle

    def call(self, worker: Worker, call: Call, on_failure: OnFailure) -> None:
        self.spawn(self._finish(worker, call, on_failure))

    def call_for_request(self, worker_id: WorkerId, request_id: RequestId, attempt: int, call: Call) -> None:
        """A call whose failure fails the request."""

        def failed(message: str) -> Event:
            return RequestFailed(request_id, attempt, worker_id, message)

        worker = self.workers.get(worker_id)
        if worker is None:
            self._post(failed(f"worker {worker_id} is gone"))
        else:
            self.call(worker, call, failed)

    async def ask_everybody(self, call: Call) -> dict[WorkerId, Any]:
        """The answer of every worker; a worker that gives none answers with its error."""
        workers = dict(sorted(self.workers.items()))
        answers = await asyncio.gather(*(call(worker.handle) for worker in workers.values()), return_exceptions=True)
        return {
            worker_id: {"error": f"{type(answer).__name__}: {answer}"} if isinstance(answer, BaseException) else answer
            for worker_id, answer in zip(workers, answers, strict=True)
        }

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends or `stop` is called."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _finish(self, worker: Worker, call: Call, on_failure: OnFailure) -> None:
        try:
            await call(worker.handle)
        except Exception as error:
            self.failures += 1
            message = f"{type(error).__name__}: {error}"
            logger.warning("a call to worker %s failed: %s", worker.spec.id, message)
            event = WorkerLost(worker.spec.id, worker.epoch) if self._is_worker_loss(error) else on_failure(message)
            if event is not None:
                self._post(event)

    async def _watch(self, worker: Worker) -> None:
        message = "its alive() call returned"
        try:
            await worker.handle.alive.remote()
        except Exception as error:
            message = type(error).__name__
        logger.warning("worker %s (epoch %d) is gone: %s", worker.spec.id, worker.epoch, message)
        self._post(WorkerLost(worker.spec.id, worker.epoch))
