"""The simulated cluster: carries out the scheduler's commands and answers with events, as the live runtime does.

Each worker has a network card, and a prefill or a decode engine. Durations come from the ground truth
(`traces/service_time.py`) alone. What the workers do on their own, without being told: they queue, batch, evict, refuse
what can never fit, and report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from conductor.core.commands import (
    Cancel,
    Command,
    DropBlocks,
    Reject,
    RequestSnapshot,
    ResumeRequest,
    StartDecode,
    StartPrefill,
    TransferBlocks,
)
from conductor.core.events import (
    Event,
    FirstToken,
    HandoverFinished,
    RequestFailed,
    RequestFinished,
    RequestResumed,
    WorkerJoined,
    WorkerLost,
)
from conductor.core.types import FinishReason, Placement, Request, Role, Tier, WorkerId, WorkerSpec
from traces.clusters.profile import ClusterProfile, FirstTokenFrom, Handover
from traces.service_time import ServiceTime
from traces.sim.cache import BlockCache
from traces.sim.decode import DecodeEngine, DecodeHooks
from traces.sim.job import Job, RequestRecord
from traces.sim.links import Link, Network
from traces.sim.loop import EventLoop
from traces.sim.prefill import EngineLimits, PrefillEngine, PrefillHooks
from traces.sim.reporter import Reporter
from traces.sim.transfers import BlockMover


@dataclass(slots=True)
class SimWorker:
    """One worker during one life."""

    spec: WorkerSpec
    reporter: Reporter
    cache: BlockCache
    incoming: Link
    outgoing: Link
    prefill: PrefillEngine | None = None
    decode: DecodeEngine | None = None


class SimCluster:
    """All workers, the network between them, and the requests that are on their way."""

    def __init__(
        self,
        loop: EventLoop,
        profile: ClusterProfile,
        records: Mapping[str, RequestRecord],
        deliver: Callable[[Event], None],
        *,
        event_lag_s: float = 0.0,
    ) -> None:
        self.workers: dict[WorkerId, SimWorker] = {}
        self.network = Network(loop, latency_s=profile.network.latency_s, contention=profile.network.contention)
        self.jobs: dict[str, Job] = {}
        self._loop = loop
        self._profile = profile
        self._truth: ServiceTime = profile.service_time()
        self._records = records
        self._deliver = deliver
        self._event_lag_s = event_lag_s
        self._orders = 0
        self._mover = BlockMover(loop, self.network, profile, self.workers)
        self._handlers: dict[type, Callable[..., None]] = {
            StartPrefill: self._start_prefill,
            StartDecode: self._start_decode,
            Reject: self._reject,
            Cancel: self._cancel,
            ResumeRequest: self._resume,
            TransferBlocks: self._mover.transfer,
            DropBlocks: self._mover.drop,
            RequestSnapshot: self._snapshot,
        }

    def execute(self, command: Command) -> None:
        """Carry out one command at the present moment."""
        self._handlers[type(command)](command)

    def join(self, spec: WorkerSpec, epoch: int) -> None:
        """A worker comes to life with an empty cache and says so."""
        reporter = Reporter(self._loop, spec.id, epoch, self._deliver, lag_s=self._event_lag_s)
        speed = self._profile.network.nic_bytes_per_s
        worker = SimWorker(
            spec,
            reporter,
            BlockCache(self._profile.device_blocks),
            Link(f"{spec.id}:in", speed),
            Link(f"{spec.id}:out", speed),
        )
        if spec.role is Role.PREFILL:
            worker.prefill = self._prefill_engine(worker)
        else:
            worker.decode = self._decode_engine()
        self.workers[spec.id] = worker
        self._deliver(WorkerJoined(spec, epoch))

    def lose(self, worker_id: WorkerId) -> None:
        """A node dies: its queues, its cache and every transfer from or to it are gone."""
        worker = self.workers.pop(worker_id)
        lost = [] if worker.prefill is None else worker.prefill.kill()
        lost += [] if worker.decode is None else worker.decode.kill()
        for job in self.jobs.values():
            if job in lost or worker_id not in (job.placement.prefill, job.decode_id):
                continue
            self._abandon(job)
        self._mover.forget(worker_id)
        self._deliver(WorkerLost(worker_id, worker.reporter.epoch))

    def _prefill_engine(self, worker: SimWorker) -> PrefillEngine:
        limits = EngineLimits(self._profile.step_tokens, self._profile.block_tokens, self._profile.max_batch)
        hooks = PrefillHooks(self._prefill_started, self._prefilled, self._refused)
        return PrefillEngine(self._loop, worker.reporter, worker.cache, self._truth.prefill, limits, hooks)

    def _decode_engine(self) -> DecodeEngine:
        hooks = DecodeHooks(self._room_reserved, self._first_token, self._decoded, self._refused)
        return DecodeEngine(
            self._loop,
            self._truth.decode,
            hooks,
            capacity_tokens=self._profile.capacity_tokens,
            max_batch=self._profile.max_batch,
        )

    def _start_prefill(self, command: StartPrefill) -> None:
        placement = command.placement
        record = self._records[placement.request_id]
        record.placement = placement
        self._orders += 1
        job = Job(record, self._request_of(placement, record), placement, self._orders)
        self.jobs[placement.request_id] = job
        worker = self.workers.get(placement.prefill)
        if worker is None or worker.prefill is None:
            return
        if placement.reuse.fetched_tokens:
            self._mover.fetch(job, worker, worker.prefill.submit)
        else:
            worker.prefill.submit(job)

    def _request_of(self, placement: Placement, record: RequestRecord) -> Request:
        if record.request.attempt != placement.attempt:
            raise ValueError(f"attempt {placement.attempt} of {record.request.id} placed; it is at {record.request.attempt}")
        return record.request

    def _start_decode(self, command: StartDecode) -> None:
        job = self.jobs[command.request_id]
        job.decode_id = command.worker_id
        if job.done_tokens == job.prompt_tokens and not job.cancelled:
            self._hand_over(job)

    def _reject(self, command: Reject) -> None:
        rejection = command.rejection
        self._records[rejection.request_id].rejection = rejection
        job = self.jobs.pop(rejection.request_id, None)
        if job is not None:
            self._abandon(job)

    def _cancel(self, command: Cancel) -> None:
        job = self.jobs.get(command.request_id)
        if job is None or job.request.attempt != command.attempt:
            return
        del self.jobs[command.request_id]
        self._abandon(job)
        self._deliver(RequestFinished(job.request.id, command.attempt, 0, FinishReason.CANCELLED))

    def _resume(self, command: ResumeRequest) -> None:
        record = self._records[command.request_id]
        self.jobs.pop(command.request_id, None)
        emitted = record.emitted_tokens
        known = record.request.emitted_tokens
        record.request = replace(
            record.request,
            attempt=command.attempt + 1,
            prompt_tokens=record.request.prompt_tokens + emitted - known,
            emitted_tokens=emitted,
            max_output_tokens=record.request.max_output_tokens,
        )
        self._deliver(RequestResumed(record.request))

    def _snapshot(self, command: RequestSnapshot) -> None:
        worker = self.workers.get(command.source)
        if worker is not None:
            worker.reporter.snapshot({Tier.DEVICE: worker.cache.contents()})

    def _abandon(self, job: Job) -> None:
        """Free what the job holds on the workers that live."""
        job.cancelled = True
        if job.flow is not None:
            self.network.stop(job.flow)
            job.flow = None
        prefill = self.workers.get(job.placement.prefill)
        if prefill is not None and prefill.prefill is not None:
            prefill.prefill.cancel(job)
        decode = None if job.decode_id is None else self.workers.get(job.decode_id)
        if decode is not None and decode.decode is not None:
            decode.decode.cancel(job)

    def _prefill_started(self, job: Job) -> None:
        if self._profile.handover is Handover.STREAMED and job.decode_id is not None:
            job.handover_start_s = self._loop.now

    def _prefilled(self, job: Job) -> None:
        if self._profile.first_token is FirstTokenFrom.PREFILL:
            self._first_token_from_prefill(job)
            if job.output_tokens == 1:
                self._end_at_prefill(job)
                return
        if job.decode_id is not None:
            self._hand_over(job)

    def _first_token_from_prefill(self, job: Job) -> None:
        job.first_token_s = self._loop.now
        self._first_token(job)

    def _end_at_prefill(self, job: Job) -> None:
        self._release_prefill(job)
        self._end(job)

    def _hand_over(self, job: Job) -> None:
        worker = None if job.decode_id is None else self.workers.get(job.decode_id)
        if worker is not None and worker.decode is not None:
            worker.decode.offer(job)

    def _room_reserved(self, job: Job) -> None:
        source, target = self.workers.get(job.placement.prefill), self._decode_worker(job)
        if source is None:
            return
        job.handover_start_s = self._loop.now
        size = job.prompt_tokens * self._profile.kv_bytes_per_token
        job.flow = self.network.start("handover", (source.outgoing, target.incoming), size, self._kv_arrived, job)

    def _kv_arrived(self, job: Job) -> None:
        job.flow = None
        self._release_prefill(job)
        size = job.prompt_tokens * self._profile.kv_bytes_per_token
        duration_s = self._loop.now - job.handover_start_s
        worker = self._decode_worker(job)
        worker.reporter.emit(HandoverFinished(job.request.id, job.request.attempt, size, duration_s))
        assert worker.decode is not None
        worker.decode.join(job)

    def _decode_worker(self, job: Job) -> SimWorker:
        assert job.decode_id is not None
        return self.workers[job.decode_id]

    def _release_prefill(self, job: Job) -> None:
        worker = self.workers.get(job.placement.prefill)
        if worker is not None and worker.prefill is not None:
            worker.prefill.release(job)

    def _first_token(self, job: Job) -> None:
        record = job.record
        if record.first_token_s is None:
            record.first_token_s = self._loop.now
        self._deliver(FirstToken(job.request.id, job.request.attempt))

    def _decoded(self, job: Job) -> None:
        self._end(job)

    def _end(self, job: Job) -> None:
        record = job.record
        record.emitted_tokens = record.output_tokens
        record.finished_s = record.last_token_s = self._loop.now
        del self.jobs[job.request.id]
        self._deliver(RequestFinished(job.request.id, job.request.attempt, record.output_tokens, FinishReason.LENGTH))

    def _refused(self, job: Job, reason: str) -> None:
        self.jobs.pop(job.request.id, None)
        self._release_prefill(job)
        job.record.failure = reason
        self._deliver(RequestFailed(job.request.id, job.request.attempt, job.placement.prefill, reason))
