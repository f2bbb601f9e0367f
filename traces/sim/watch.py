"""Looks at the simulated cluster at regular virtual times: the load of both pools, and what its workers say of theirs.

Load is 1.0 at the objective (arXiv v3, section 7), counted in truth: for prefill the mean time that a worker needs for
everything that waits for it, centrally or in its own queue, over the TTFT objective; for decode the mean duration of a step
over the TBT objective. Looking changes nothing; only load reports, where they are asked for, reach the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from statistics import fmean

from conductor.core.types import SLO, Request, WorkerId
from traces.outcomes import LoadSample
from traces.service_time import ServiceTime
from traces.sim.job import RequestRecord
from traces.sim.loop import At, EventLoop
from traces.sim.replicas import ReplicaLog
from traces.sim.worker import SimWorker

LOOK_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class DecodeState:
    """One decode engine at one moment."""

    batch: int
    context_tokens: int
    free_tokens: int


class Watch:
    """Samples for as long as anything else is planned, and lets the workers report every `reports_s` where that is given.

    `records` are the trace's, in order of arrival.
    """

    def __init__(
        self,
        loop: EventLoop,
        truth: ServiceTime,
        workers: Mapping[WorkerId, SimWorker],
        records: Mapping[str, RequestRecord],
        slo: SLO,
        reports_s: float | None = None,
    ) -> None:
        self.interval_s = LOOK_EVERY_S if reports_s is None else reports_s
        self.loads: list[LoadSample] = []
        self.replicas: ReplicaLog | None = None
        self.decode_states: list[tuple[DecodeState, ...]] = []
        self._records = records
        self._arrived = 0
        self._waiting: list[RequestRecord] = []
        self._loop = loop
        self._truth = truth
        self._workers = workers
        self._slo = slo
        self._reports = reports_s is not None

    def start(self) -> None:
        self._loop.at(self._loop.now, At.SAMPLE, self._look)

    def _look(self) -> None:
        engines = [worker.decode for worker in self._workers.values() if worker.decode is not None]
        states = tuple(DecodeState(e.batch, e.context_tokens, e.capacity_tokens - e.reserved_tokens) for e in engines)
        self.decode_states.append(states)
        if self._slo.ttft_s is not None and self._slo.tbt_s is not None:
            sample = LoadSample(self._loop.now, self._prefill_s() / self._slo.ttft_s, self._decode_s(states) / self._slo.tbt_s)
            self.loads.append(sample)
        if self.replicas is not None:
            pools = [worker.cache for worker in self._workers.values() if worker.prefill is not None]
            self.replicas.look(self._loop.now, pools)
        if self._reports:
            for worker in self._workers.values():
                worker.report_load()
        if self._loop.pending:
            self._loop.at(self._loop.now + self.interval_s, At.SAMPLE, self._look)

    def _prefill_s(self) -> float:
        """Seconds of prefill that lie ahead of a worker, on average."""
        engines = [worker.prefill for worker in self._workers.values() if worker.prefill is not None]
        time = self._truth.prefill
        ahead_s = sum(engine.ahead_s() for engine in engines)
        ahead_s += sum(time.step_s([(0, request.prompt_tokens)]) for request in self._unplaced())
        return ahead_s / len(engines) if engines else 0.0

    def _unplaced(self) -> list[Request]:
        """Requests that have arrived and wait for a worker."""
        newer = islice(self._records.values(), self._arrived, None)
        arrived = list(takewhile(lambda record: record.arrival_s <= self._loop.now, newer))
        self._arrived += len(arrived)
        self._waiting = [
            record for record in (*self._waiting, *arrived) if record.placement is None and record.rejection is None
        ]
        return [record.request for record in self._waiting]

    def _decode_s(self, states: Iterable[DecodeState]) -> float:
        steps_s = [self._truth.decode.step_s(state.batch, state.context_tokens) if state.batch else 0.0 for state in states]
        return fmean(steps_s) if steps_s else 0.0
