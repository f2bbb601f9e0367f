"""Judges rejections in hindsight: could the request have been served, given everything that did happen?

A rejection is false when some prefill worker stood idle long enough within the TTFT objective to compute the prompt, reusing
what its pool held at the rejection, and when at that moment a decode worker had room for the request and a step with it in
the batch would have kept the TBT objective. Nobody else would have been delayed, so this counts the certain cases: a request
that only a reordering of others could have served does not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from conductor.core.types import SLO, Rejection, RejectReason, WorkerId
from traces.clusters.profile import ClusterProfile
from traces.sim.job import RequestRecord
from traces.sim.prefill import StepLog
from traces.sim.watch import DecodeState, Watch
from traces.sim.worker import SimWorker

PREDICTED_REASONS = (RejectReason.TTFT_SLO, RejectReason.TBT_SLO, RejectReason.OVERLOAD, RejectReason.QUEUE_FULL)


class Chance(NamedTuple):
    """What one prefill worker would have needed for a refused prompt."""

    steps: StepLog
    work_s: float


class Hindsight:
    """Remembers each rejection's chances; `falsely_rejected` judges once the run is over."""

    def __init__(self, cluster: ClusterProfile, workers: Mapping[WorkerId, SimWorker], watch: Watch, slo: SLO) -> None:
        self._cluster = cluster
        self._truth = cluster.service_time()
        self._workers = workers
        self._watch = watch
        self._slo = slo
        self._refused: dict[str, tuple[float, list[Chance]]] = {}

    def note(self, record: RequestRecord, rejection: Rejection, now: float) -> None:
        """A request is refused at `now`."""
        if rejection.reason in PREDICTED_REASONS:
            engines = [worker for worker in self._workers.values() if worker.prefill is not None]
            self._refused[rejection.request_id] = (now, [self._chance(record, worker) for worker in engines])

    def falsely_rejected(self, record: RequestRecord) -> bool:
        """Whether a refused request could have been served. What no prediction refused was refused rightly."""
        if record.request.id not in self._refused:
            return False
        now, chances = self._refused[record.request.id]
        done_s = min((chance.steps.done_s(now, chance.work_s) for chance in chances), default=math.inf)
        limit_s = math.inf if self._slo.ttft_s is None else record.arrival_s + self._slo.ttft_s
        return done_s <= limit_s and self._decodes(record, done_s)

    def _chance(self, record: RequestRecord, worker: SimWorker) -> Chance:
        assert worker.prefill is not None
        request, block_tokens = record.request, self._cluster.block_tokens
        blocks = request.block_hashes[: (request.prompt_tokens - 1) // block_tokens]
        reused = worker.cache.match(blocks) * block_tokens if self._cluster.reuse_blocks else 0
        work_s = self._truth.prompt_s(request.prompt_tokens, reused, self._cluster.step_tokens)
        return Chance(worker.prefill.steps, work_s)

    def _decodes(self, record: RequestRecord, at_s: float) -> bool:
        samples = self._watch.decode_states
        nearest = min(len(samples) - 1, round(at_s / self._watch.interval_s)) if math.isfinite(at_s) else len(samples) - 1
        return any(self._fits(record, state) for state in samples[nearest])

    def _fits(self, record: RequestRecord, state: DecodeState) -> bool:
        prompt_tokens = record.request.prompt_tokens
        if state.free_tokens < prompt_tokens + record.output_tokens or state.batch >= self._cluster.max_batch:
            return False
        step_s = self._truth.decode.step_s(state.batch + 1, state.context_tokens + prompt_tokens)
        return self._slo.tbt_s is None or step_s <= self._slo.tbt_s
