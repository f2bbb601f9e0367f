"""What the scheduler believes of the prefill workers: their queues, speed, links and the index slots of their caches.

Queue time is the predicted remaining time of what a worker runs plus the predicted time of what it has queued. Work counts from
the moment it is dispatched, before the worker has said a word, so that a burst does not herd onto one worker; reports
correct it (`PrefillStarted`, `PrefillFinished`, `LoadReported`). It is never negative: the running part is an end time that
`now` overtakes, the queued part a sum over the requests that are really there. What others sent to a worker counts until its
time has passed, should the worker say no more. (Mooncake FAST'25, EstimatePrefillQueueTime.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import numpy as np

from conductor.core.types import Holder, InvariantError, RequestId, Role, Tier, WorkerId, WorkerLoad, WorkerSpec
from conductor.core.worker_table import BoolArray, FloatArray, IntArray, WorkerTable

UNCHUNKED_TOKENS = 2.0**40


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """Work that one request means for its prefill worker, as predicted when it was dispatched."""

    work_s: float
    new_tokens: int


class PrefillPool(WorkerTable):
    COLUMNS: ClassVar[Mapping[str, type]] = {
        "slot": np.int64,
        "host_slot": np.int64,
        "disk_slot": np.int64,
        "shared_slot": np.int64,
        "base_s": np.float64,
        "per_token_s": np.float64,
        "per_token2_s": np.float64,
        "chunk_tokens": np.float64,
        "packs_prompts": np.bool_,
        "running_end_s": np.float64,
        "pending_s": np.float64,
        "foreign_s": np.float64,
        "foreign_end_s": np.float64,
        "active_tokens": np.float64,
        "churn_tokens": np.float64,
        "jobs": np.int64,
        "correction": np.float64,
        "calibrated_until_s": np.float64,
        "profile_group": np.int64,
        "log_error": np.float64,
        "low_factor": np.float64,
        "high_factor": np.float64,
        "trust": np.float64,
        "nic_bytes_per_s": np.float64,
        "link_bytes_per_s": np.float64,
        "host_bytes_per_s": np.float64,
        "disk_bytes_per_s": np.float64,
        "shared_bytes_per_s": np.float64,
        "latency_s": np.float64,
        "kv_bytes_per_token": np.float64,
        "window_bytes_per_token": np.float64,
        "window_tokens": np.float64,
        "layer_groups": np.float64,
        "handover_s_per_token": np.float64,
        "handover_window_s_per_token": np.float64,
        "handover_latency_s": np.float64,
        "handover_groups": np.float64,
        "overlap_share": np.float64,
        "flow_share": np.float64,
        "flows_in": np.float64,
        "flows_out": np.float64,
        "flows_stored": np.float64,
        "storage_left_bytes": np.float64,
        "capacity_blocks": np.float64,
        "accepts": np.bool_,
    }

    slot: IntArray
    host_slot: IntArray
    disk_slot: IntArray
    shared_slot: IntArray
    base_s: FloatArray
    per_token_s: FloatArray
    per_token2_s: FloatArray
    chunk_tokens: FloatArray
    packs_prompts: BoolArray
    running_end_s: FloatArray
    pending_s: FloatArray
    foreign_s: FloatArray
    foreign_end_s: FloatArray
    active_tokens: FloatArray
    churn_tokens: FloatArray
    jobs: IntArray
    correction: FloatArray
    calibrated_until_s: FloatArray
    profile_group: IntArray  # workers of one profile have one number
    log_error: FloatArray  # of the predictions for this worker
    low_factor: FloatArray
    high_factor: FloatArray
    trust: FloatArray
    nic_bytes_per_s: FloatArray
    link_bytes_per_s: FloatArray
    host_bytes_per_s: FloatArray
    disk_bytes_per_s: FloatArray
    shared_bytes_per_s: FloatArray
    latency_s: FloatArray
    kv_bytes_per_token: FloatArray
    window_bytes_per_token: FloatArray  # of these, what moves for the last `window_tokens` tokens only
    window_tokens: FloatArray
    layer_groups: FloatArray
    handover_s_per_token: FloatArray
    handover_window_s_per_token: FloatArray
    handover_latency_s: FloatArray
    handover_groups: FloatArray
    overlap_share: FloatArray  # of a transfer that hides behind the compute, or of the compute that hides behind it
    flow_share: FloatArray  # of a step's time, after which the next step of the prompt may begin
    flows_in: FloatArray
    flows_out: FloatArray
    flows_stored: FloatArray  # those of flows_in that come from the shared store
    storage_left_bytes: FloatArray  # being read from the shared store over the link of the worker's host
    capacity_blocks: FloatArray
    accepts: BoolArray

    def __init__(self) -> None:
        super().__init__()
        self._work: dict[WorkerId, dict[RequestId, PrefillJob]] = {}
        self._queue_s: tuple[float, FloatArray] | None = None
        self._churn_share: FloatArray | None = None
        self._inbound_bytes_per_s: FloatArray | None = None
        self._foreign_until_s = -math.inf
        self.distrusted = False  # whether any worker's claims are discounted
        self.lower_holders: tuple[Holder, ...] = ()  # host, disk and shared store of each row; empty where nobody has any
        self.chunked = False  # whether any worker cuts prompts into steps
        self.staged = False  # whether any worker begins a step before it has finished one
        self.windowed = False  # whether any worker's transfers leave window state behind
        self.layered = False  # whether any worker's transfers overlap its compute
        self.awaits_handover = False  # whether the first token of any worker's prompts leaves its decode worker

    def join(self, spec: WorkerSpec, slots: Mapping[str, int]) -> None:
        """Add a worker. `slots` gives the index slot of its device pool and of the lower tiers that it can restore from."""
        profile = spec.profile
        values: dict[str, float] = {
            "base_s": profile.prefill_base_s,
            "per_token_s": profile.prefill_per_token_s,
            "per_token2_s": profile.prefill_per_token2_s,
            "chunk_tokens": UNCHUNKED_TOKENS if profile.chunk_tokens is None else profile.chunk_tokens,
            "packs_prompts": profile.packs_prompts,
            "correction": 1.0,
            "calibrated_until_s": -math.inf,
            "low_factor": profile.residuals.p10,
            "high_factor": profile.residuals.p90,
            "trust": 1.0,
            "nic_bytes_per_s": math.inf if spec.nic_bytes_per_s is None else spec.nic_bytes_per_s,
            "link_bytes_per_s": profile.transfer_bytes_per_s,
            "host_bytes_per_s": tier_bytes_per_s(spec, Tier.HOST),
            "disk_bytes_per_s": tier_bytes_per_s(spec, Tier.DISK),
            "shared_bytes_per_s": tier_bytes_per_s(spec, Tier.SHARED),
            "latency_s": profile.transfer_latency_s,
            "kv_bytes_per_token": profile.kv_bytes_per_token,
            "window_bytes_per_token": profile.kv_window_bytes_per_token,
            "window_tokens": profile.kv_window_tokens,
            "layer_groups": profile.layer_groups,
            "overlap_share": 1.0 - 1.0 / profile.layer_groups,
            "flow_share": profile.flow_share,
            "capacity_blocks": spec.capacity_blocks.get(Tier.DEVICE, math.inf),
            "accepts": spec.role is not Role.DECODE,
        }
        self._insert(spec, {**values, **_handover(spec), **slots})
        self._work[spec.id] = {}
        self._forget_rows()

    def relink(self, worker: WorkerId, bytes_per_s: float, shared_bytes_per_s: float, latency_s: float) -> None:
        """What brings KV to a worker is worth this: to one transfer, and to all at once."""
        row, card_bytes_per_s = self.row[worker], self.specs[worker].nic_bytes_per_s
        self.link_bytes_per_s[row], self.latency_s[row] = bytes_per_s, latency_s
        self.nic_bytes_per_s[row] = min(shared_bytes_per_s, math.inf if card_bytes_per_s is None else card_bytes_per_s)
        self.links_changed()

    def leave(self, worker: WorkerId) -> None:
        self._delete(worker)
        del self._work[worker]
        self._forget_rows()

    def queue_s(self, now: float) -> FloatArray:
        """Seconds until each worker could start something more. The array is not to be written to."""
        if self._queue_s is not None and self._queue_s[0] == now:
            return self._queue_s[1]
        queue: FloatArray = np.maximum(self.running_end_s - now, 0.0)
        queue += self.pending_s
        if now < self._foreign_until_s:
            queue += np.minimum(np.maximum(self.foreign_end_s - now, 0.0), self.foreign_s)
        self._queue_s = now, queue
        return queue

    def churn_share(self) -> FloatArray:
        """How much more each worker's cache has been written than the least written one, as a share of all of it. The array is
        not to be written to."""
        share = self._churn_share
        if share is None:
            churn = self.churn_tokens
            least, most = churn.item(churn.argmin()), churn.item(churn.argmax())
            share = self._churn_share = (churn - least) / max(most - least, 1.0)
        return share

    def inbound_bytes_per_s(self) -> FloatArray:
        """What each worker's card and link leave to one more transfer. The array is not to be written to."""
        bandwidth = self._inbound_bytes_per_s
        if bandwidth is None:
            bandwidth = self._inbound_bytes_per_s = self.nic_bytes_per_s / (self.flows_in + 1.0)
            np.minimum(bandwidth, self.link_bytes_per_s, out=bandwidth)
        return bandwidth

    def inbound_over(self, link_bytes_per_s: FloatArray) -> FloatArray:
        """The same over other links than the pool's own."""
        bandwidth: FloatArray = np.minimum(self.nic_bytes_per_s / (self.flows_in + 1.0), link_bytes_per_s)
        return bandwidth

    def links_changed(self) -> None:
        """Transfers came or went."""
        self.version += 1
        self._inbound_bytes_per_s = None

    def recalibrate(self, worker: WorkerId, correction: float, log_error: float) -> None:
        """Correct a worker's prefill times. Arrays that a decision has seen stay as they were."""
        row, residuals = self.row[worker], self.specs[worker].profile.residuals
        self.version += 1
        self.correction[row], self.log_error[row] = correction, log_error
        self.low_factor, self.high_factor = self.low_factor.copy(), self.high_factor.copy()
        self.low_factor[row] = min(residuals.p10, math.exp(-log_error))
        self.high_factor[row] = max(residuals.p90, math.exp(log_error))

    def believe(self, worker: WorkerId, share: float) -> None:
        """Take the worker's claims for `share` of what they say."""
        self.version += 1
        self.trust[self.row[worker]] = share
        self.distrusted = bool((self.trust < 1.0).any())

    def worker_queue_s(self, worker: WorkerId, now: float) -> float:
        row = self.row[worker]
        foreign_s = min(max(float(self.foreign_end_s[row]) - now, 0.0), float(self.foreign_s[row]))
        return max(float(self.running_end_s[row]) - now, 0.0) + float(self.pending_s[row]) + foreign_s

    def book(self, worker: WorkerId, request: RequestId, job: PrefillJob, now: float) -> None:
        """Count work that has just been dispatched."""
        work, row = self._work[worker], self.row[worker]
        self._queue_s = self._churn_share = None
        if work:
            self.pending_s[row] += job.work_s
        else:
            self.running_end_s[row] = now + job.work_s
        work[request] = job
        self.jobs[row] = len(work)
        self.active_tokens[row] += job.new_tokens
        self.churn_tokens[row] += job.new_tokens

    def started(self, worker: WorkerId, request: RequestId, now: float) -> None:
        """The worker began with `request`; a request that overtook others leaves the sum as it is."""
        work = self._work[worker]
        if request in work and next(iter(work)) == request:
            self._queue_s = None
            self.running_end_s[self.row[worker]] = now + work[request].work_s

    def release(self, worker: WorkerId, request: RequestId, now: float) -> None:
        """The request's work is done or given up; the next one in line counts as running from `now`."""
        work, row = self._work[worker], self.row[worker]
        if request not in work:
            return
        self._queue_s = None
        was_running = next(iter(work)) == request
        self.active_tokens[row] -= work.pop(request).new_tokens
        self.jobs[row] = len(work)
        self.pending_s[row] = sum(job.work_s for job in islice(work.values(), 1, None))
        if was_running:
            following = next(iter(work.values())).work_s if work else 0.0
            self.running_end_s[row] = now + following

    def report(self, worker: WorkerId, load: WorkerLoad, now: float) -> None:
        """Correct the belief by what the worker says. What was dispatched since it looked is still counted from our side."""
        row = self.row[worker]
        self._queue_s = None
        if load.running_prefill_remaining_s > 0.0:
            self.running_end_s[row] = now + load.running_prefill_remaining_s
        unknown_tokens = max(0, load.queued_prefill_tokens - int(self.active_tokens[row]))
        self.foreign_s[row] = unknown_tokens * float(self.per_token_s[row] * self.correction[row])
        self.foreign_end_s[row] = max(float(self.running_end_s[row]), now) + self.foreign_s[row]
        self._foreign_until_s = max(self._foreign_until_s, float(self.foreign_end_s[row]))

    def tier_was_read(self, worker: WorkerId, tier: Tier, bytes_per_s: float) -> None:
        """What the worker's restores from a tier have come to, in place of what its profile says."""
        column: FloatArray = getattr(self, f"{tier.name.lower()}_bytes_per_s")
        column[self.row[worker]] = bytes_per_s

    def prefill_s(self, worker: WorkerId, prompt_tokens: int, reused_tokens: int) -> float:
        """Corrected prediction for one worker."""
        predicted = self.specs[worker].profile.prefill_s(prompt_tokens, reused_tokens)
        return predicted * float(self.correction[self.row[worker]])

    def _forget_rows(self) -> None:
        """Rows came or went: nothing that was kept has the right length any more."""
        self._queue_s = self._churn_share = self._inbound_bytes_per_s = None
        self.distrusted = bool((self.trust < 1.0).any())
        self.awaits_handover = bool(self.handover_groups.any())
        self.chunked = bool((self.chunk_tokens < UNCHUNKED_TOKENS).any())
        self.staged = bool((self.flow_share < 1.0).any())
        self.windowed = bool(self.window_bytes_per_token.any())
        self.layered = bool((self.layer_groups > 1.0).any())

    def _check_kept(self) -> None:
        now, queue_s = self._queue_s or (0.0, None)
        kept = queue_s, self._churn_share, self._inbound_bytes_per_s
        self._queue_s = self._churn_share = self._inbound_bytes_per_s = None
        fresh = self.queue_s(now), self.churn_share(), self.inbound_bytes_per_s()
        if any(old is not None and not np.array_equal(old, new) for old, new in zip(kept, fresh, strict=True)):
            raise InvariantError(f"queues, churn and bandwidths {kept} are kept, but {fresh} hold")

    def check(self) -> None:
        super().check()
        for worker, row in self.row.items():
            work = self._work[worker]
            if self.jobs[row] != len(work) or int(self.active_tokens[row]) != sum(job.new_tokens for job in work.values()):
                raise InvariantError(f"{worker}: {self.jobs[row]} jobs counted, {len(work)} outstanding")
            if self.pending_s[row] < 0.0 or (len(work) < 2 and self.pending_s[row] != 0.0):
                raise InvariantError(f"{worker}: {self.pending_s[row]} s pending for {len(work)} outstanding requests")
            if self.flows_in[row] < 0 or self.flows_out[row] < 0:
                raise InvariantError(f"{worker}: negative number of transfers in flight")
        if self.ids:
            self._check_kept()


def _handover(spec: WorkerSpec) -> dict[str, float]:
    """Cost of the hand-over to a first token that waits for it: none where the worker itself sends that token."""
    profile = spec.profile
    if not profile.first_token_after_handover or spec.role is Role.COUPLED:
        return {}
    nic_bytes_per_s = math.inf if spec.nic_bytes_per_s is None else spec.nic_bytes_per_s
    bytes_per_s = min(profile.transfer_bytes_per_s, nic_bytes_per_s)
    return {
        "handover_s_per_token": profile.kv_bytes_per_token / bytes_per_s,
        "handover_window_s_per_token": profile.kv_window_bytes_per_token / bytes_per_s,
        "handover_latency_s": profile.transfer_latency_s,
        "handover_groups": profile.layer_groups if profile.handover_overlaps_prefill else 1.0,
    }


def tier_bytes_per_s(spec: WorkerSpec, tier: Tier) -> float:
    """The profile's bandwidth of a tier, which it lists in order of `Tier`; a tier that it leaves out costs no time."""
    listed = spec.profile.tier_bytes_per_s
    return listed[tier] if tier < len(listed) and listed[tier] > 0.0 else math.inf
