"""The simulated cluster: carries out the scheduler's commands and answers with events, as the live runtime does.

Each worker has a network card, and a prefill or a decode engine. Durations come from the ground truth
(`traces/service_time.py`) alone. What the workers do on their own, without being told: they queue, batch, evict, refuse
what can never fit, and report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

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
from conductor.core.types import FinishReason, Placement, Rejection, Request, Role, Tier, WorkerId, WorkerSpec
from traces.clusters.profile import ClusterProfile, FirstTokenFrom, Handover, LowerTier
from traces.service_time import ServiceTime
from traces.sim.cache import BlockCache
from traces.sim.coupled import CoupledDecode
from traces.sim.decode import DecodeEngine, DecodeHooks
from traces.sim.job import Job, RequestRecord
from traces.sim.links import Link, Network
from traces.sim.loop import At, EventLoop
from traces.sim.prefill import EngineLimits, PrefillEngine, PrefillHooks
from traces.sim.processors import Processors
from traces.sim.reporter import Reporter
from traces.sim.transfers import BlockMover
from traces.sim.worker import SimWorker, TierStore


class Answers(NamedTuple):
    """Who hears of the cluster: the scheduler of every event, the watcher of every request that was refused."""

    event: Callable[[Event], None]
    refused: Callable[[RequestRecord, Rejection], None]


class World(NamedTuple):
    """What no profile says: how late reports come, and the seed of the steps' variation."""

    event_lag_s: float = 0.0
    seed: int = 0


class SimCluster:
    """All workers, the network between them, and the requests that are on their way."""

    def __init__(
        self,
        loop: EventLoop,
        profile: ClusterProfile,
        records: Mapping[str, RequestRecord],
        answers: Answers,
        world: World,
    ) -> None:
        self.workers: dict[WorkerId, SimWorker] = {}
        self.network = Network(loop, latency_s=profile.network.latency_s, contention=profile.network.contention)
        self.jobs: dict[str, Job] = {}
        self._loop = loop
        self._profile = profile
        self._truth: ServiceTime = profile.service_time()
        shared = profile.processors
        self._processors = None if shared is None else Processors(shared.count, shared.crowding)
        self._records = records
        self._deliver = answers.event
        self._refused_for_good = answers.refused
        self._world = world
        self._orders = 0
        self._parents: dict[int, int | None] = {}
        self._shared = self._tier_store("shared", "shared") if "shared" in profile.tiers else None
        self._mover = BlockMover(loop, self.network, profile, self.workers, self._deliver, self._parent_of)
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
        reporter = Reporter(self._loop, spec.id, epoch, self._deliver, lag_s=self._world.event_lag_s)
        speed = self._profile.network.nic_bytes_per_s
        pool = BlockCache(self._profile.pool_blocks(prefill_only=spec.role is Role.PREFILL))
        worker = SimWorker(spec, reporter, pool, Link(f"{spec.id}:in", speed), Link(f"{spec.id}:out", speed))
        if self._profile.storage is not None:
            worker.storage = Link(f"{spec.id}:storage", self._profile.storage.nic_bytes_per_s)
        if spec.role is not Role.DECODE:
            worker.tiers = self._tiers(spec.node)
        if spec.role is Role.COUPLED:
            worker.decode = coupled = self._coupled_decode()
            worker.prefill = self._prefill_engine(worker, coupled)
        elif spec.role is Role.PREFILL:
            worker.prefill = self._prefill_engine(worker)
        else:
            worker.decode = self._decode_engine()
        self.workers[spec.id] = worker
        self._deliver(WorkerJoined(spec, epoch))
        if self._shared is not None and len(self._shared) and worker.tiers:
            worker.snapshot()

    def lose(self, worker_id: WorkerId) -> None:
        """A node dies: its queues, its caches and every transfer from or to it are gone."""
        worker = self.workers.pop(worker_id, None)
        if worker is None:
            return
        if worker.prefill is not None:
            worker.prefill.kill()
        if worker.decode is not None:
            worker.decode.kill()
        for job in self.jobs.values():
            if job.flow is not None and worker_id in (job.placement.prefill, job.decode_id):
                self._stop_handover(job)
        self._mover.forget(worker)
        self._deliver(WorkerLost(worker_id, worker.reporter.epoch))

    def _tiers(self, node: str) -> dict[Tier, TierStore]:
        """Lower tiers of one node; the shared one is the cluster's."""
        own: tuple[tuple[Tier, LowerTier], ...] = ((Tier.HOST, "host"), (Tier.DISK, "disk"))
        tiers = {tier: self._tier_store(name, f"{node}:{name}") for tier, name in own if name in self._profile.tiers}
        if self._shared is not None:
            tiers[Tier.SHARED] = self._shared
        return tiers

    def _tier_store(self, name: LowerTier, link: str) -> TierStore:
        values = self._profile.tiers[name]
        return TierStore(values.blocks, Link(link, values.bytes_per_s))

    def _prefill_engine(self, worker: SimWorker, coupled: CoupledDecode | None = None) -> PrefillEngine:
        profile = self._profile
        limits = EngineLimits(
            worker.spec.profile,
            profile.step_tokens,
            profile.block_tokens,
            profile.max_batch,
            reuse_blocks=profile.reuse_blocks,
            chunked=profile.chunked_prefill,
            hold_output=coupled is not None,
            step_variation=profile.step_variation,
            seed=self._world.seed,
            processors=None if coupled else self._processors,
        )
        gate = None if coupled is None else coupled.lend
        freed = partial(self._mover.begin_fetches, worker)
        hooks = PrefillHooks(self._prefill_started, self._prefilled, self._refused, freed, gate)
        return PrefillEngine(self._loop, worker.reporter, worker.cache, self._truth, limits, hooks)

    def _decode_hooks(self) -> DecodeHooks:
        return DecodeHooks(self._room_reserved, self._first_token, self._end, self._refused_by_decode)

    def _decode_engine(self) -> DecodeEngine:
        room, batch = self._profile.capacity_tokens, self._profile.max_batch
        return DecodeEngine(
            self._loop,
            self._truth.decode,
            self._decode_hooks(),
            capacity_tokens=room,
            max_batch=batch,
            processors=self._processors,
        )

    def _coupled_decode(self) -> CoupledDecode:
        return CoupledDecode(
            self._loop,
            self._truth.decode,
            self._decode_hooks(),
            capacity_tokens=self._profile.capacity_tokens,
            max_batch=self._profile.max_batch,
            mixed_steps=self._profile.chunked_prefill,
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
        job = self.jobs.get(command.request_id)
        if job is None:
            return
        job.decode_id = command.worker_id
        if job.done_tokens == job.prompt_tokens and not job.cancelled:
            self._hand_over(job)

    def _reject(self, command: Reject) -> None:
        rejection = command.rejection
        record = self._records[rejection.request_id]
        record.rejection = rejection
        self._refused_for_good(record, rejection)
        job = self.jobs.pop(rejection.request_id, None)
        if job is not None:
            self._abandon(job)

    def _cancel(self, command: Cancel) -> None:
        job = self.jobs.get(command.request_id)
        if job is not None and job.request.attempt == command.attempt:
            del self.jobs[command.request_id]
            self._abandon(job)

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
        )
        self._deliver(RequestResumed(record.request))

    def _snapshot(self, command: RequestSnapshot) -> None:
        worker = self.workers.get(command.source)
        if worker is not None:
            worker.snapshot()

    def _abandon(self, job: Job) -> None:
        """Free what the job holds on the workers that live."""
        job.cancelled = True
        if job.flow is not None:
            self._stop_handover(job)
        self._mover.abort(job)
        prefill = self.workers.get(job.placement.prefill)
        if prefill is not None and prefill.prefill is not None:
            prefill.prefill.cancel(job)
        decode = None if job.decode_id is None else self.workers.get(job.decode_id)
        if decode is not None and decode.decode is not None:
            decode.decode.cancel(job)

    def _stop_handover(self, job: Job) -> None:
        assert job.flow is not None
        self.network.stop(job.flow)
        job.flow = None

    def _prefill_started(self, job: Job) -> None:
        """With streamed hand-over the KV starts to travel with the prompt's first step."""
        target = None if job.decode_id is None else self.workers.get(job.decode_id)
        if self._profile.handover is Handover.STREAMED and target is not None and job.decode_id != job.placement.prefill:
            self._send_kv(job, self.workers[job.placement.prefill], target)

    def _prefilled(self, job: Job) -> None:
        self.workers[job.placement.prefill].write_through(job.request.block_hashes)
        if self._profile.first_token is FirstTokenFrom.PREFILL or job.decode_id == job.placement.prefill:
            job.first_token_s = self._loop.now
            self._first_token(job)
            if job.output_tokens == 1:
                self._end(job)
                return
        if job.decode_id is not None:
            self._hand_over(job)

    def _hand_over(self, job: Job) -> None:
        """The prompt is complete and its decode worker known."""
        assert job.decode_id is not None
        worker = self.workers.get(job.decode_id)
        if worker is None or worker.decode is None:
            message = f"decode worker {job.decode_id} is gone"
            self._deliver(RequestFailed(job.request.id, job.request.attempt, job.decode_id, message))
        elif isinstance(worker.decode, CoupledDecode):
            worker.decode.enter(job)
        else:
            worker.decode.offer(job)

    def _room_reserved(self, job: Job) -> None:
        """The decode worker has room: send the KV, or wait for the rest of a stream that began with the prompt."""
        source = self.workers.get(job.placement.prefill)
        if job.kv_arrived_s is not None:
            last_group_s = self._last_group_s(job)
            self._loop.at(self._loop.now + last_group_s, At.COMPLETION, self._kv_complete, job)
        elif job.flow is None and source is not None:
            self._send_kv(job, source, self._decode_worker(job))

    def _last_group_s(self, job: Job) -> float:
        """The last layers' KV of the last chunk leaves when the last step ends."""
        chunk = min(job.prompt_tokens - job.reused_tokens, self._profile.step_tokens)
        size_bytes = chunk * self._profile.kv_bytes_per_token / self._profile.layer_groups
        return self._profile.network.latency_s + size_bytes / self._profile.network.nic_bytes_per_s

    def _send_kv(self, job: Job, source: SimWorker, target: SimWorker) -> None:
        job.handover_start_s = self._loop.now
        size_bytes = job.prompt_tokens * self._profile.kv_bytes_per_token
        job.flow = self.network.start("handover", (source.outgoing, target.incoming), size_bytes, self._kv_arrived, job)

    def _kv_arrived(self, job: Job) -> None:
        job.flow = None
        job.kv_arrived_s = self._loop.now
        if job.done_tokens == job.prompt_tokens:
            self._kv_complete(job)

    def _kv_complete(self, job: Job) -> None:
        """The decode worker holds the whole prompt's KV, and has room for it."""
        worker = self.workers.get(self._decode_id(job))
        if job.cancelled or worker is None or worker.decode is None or not worker.decode.expects(job):
            return
        self._release_prefill(job)
        size_bytes = job.prompt_tokens * self._profile.kv_bytes_per_token
        duration_s = self._loop.now - job.handover_start_s
        worker.reporter.emit(HandoverFinished(job.request.id, job.request.attempt, size_bytes, duration_s))
        worker.decode.join(job)

    def _decode_id(self, job: Job) -> WorkerId:
        assert job.decode_id is not None
        return job.decode_id

    def _decode_worker(self, job: Job) -> SimWorker:
        return self.workers[self._decode_id(job)]

    def _release_prefill(self, job: Job) -> None:
        worker = self.workers.get(job.placement.prefill)
        if worker is not None and worker.prefill is not None:
            worker.prefill.release(job)

    def _first_token(self, job: Job) -> None:
        record = job.record
        record.emitted_tokens = max(record.emitted_tokens, job.request.emitted_tokens + 1)
        if record.first_token_s is None:
            record.first_token_s = self._loop.now
        self._deliver(FirstToken(job.request.id, job.request.attempt))

    def _end(self, job: Job) -> None:
        """The last token is out."""
        self._release_prefill(job)
        record = job.record
        record.emitted_tokens = record.output_tokens
        record.finished_s = self._loop.now
        del self.jobs[job.request.id]
        self._deliver(RequestFinished(job.request.id, job.request.attempt, record.output_tokens, FinishReason.LENGTH))

    def _refused(self, job: Job, reason: str) -> None:
        self._deliver(RequestFailed(job.request.id, job.request.attempt, job.placement.prefill, reason))

    def _refused_by_decode(self, job: Job, reason: str) -> None:
        self._deliver(RequestFailed(job.request.id, job.request.attempt, self._decode_id(job), reason))

    def _parent_of(self) -> Mapping[int, int | None]:
        """The block before each block of the trace: a block's identity is its whole prefix, so it has one parent."""
        if not self._parents:
            for record in self._records.values():
                blocks = record.request.block_hashes
                self._parents.update(zip(blocks, (None, *blocks[:-1]), strict=True))
        return self._parents
