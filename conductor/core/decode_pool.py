"""What the scheduler believes of the decode workers: batch, context, KV capacity and what is reserved of it.

Capacity for prompt plus expected output is reserved when a request is placed, before its prefill starts, and returned when it
ends: a request that has been prefilled always finds room. `incoming` is what is placed but not yet decoding, `active` what is,
`foreign` what others run there, `promised` the sum of all three.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from conductor.core.types import InvariantError, RequestId, Role, Tier, WorkerId, WorkerLoad, WorkerSpec
from conductor.core.worker_table import BoolArray, FloatArray, IntArray, WorkerTable


@dataclass(slots=True)
class Reservation:
    """What one request holds on its decode worker. `until_s` is when it is expected to be done, once it decodes."""

    blocks: int
    context_tokens: int
    active: bool = False
    until_s: float = math.inf


class DecodePool(WorkerTable):
    COLUMNS: ClassVar[Mapping[str, type]] = {
        "slot": np.int64,
        "base_s": np.float64,
        "per_sequence_s": np.float64,
        "per_context_token_s": np.float64,
        "correction": np.float64,
        "calibrated_until_s": np.float64,
        "low_factor": np.float64,
        "high_factor": np.float64,
        "active_batch": np.int64,
        "active_context": np.int64,
        "incoming_batch": np.int64,
        "incoming_context": np.int64,
        "foreign_batch": np.int64,
        "foreign_context": np.int64,
        "promised_batch": np.float64,
        "promised_context": np.float64,
        "reserved_blocks": np.float64,
        "capacity_blocks": np.float64,
        "max_batch": np.float64,
        "nic_bytes_per_s": np.float64,
        "flows_in": np.float64,
        "flows_out": np.float64,
        "storage_bytes_per_s": np.float64,
        "storage_wait_s": np.float64,
        "accepts": np.bool_,
    }

    slot: IntArray
    base_s: FloatArray
    per_sequence_s: FloatArray
    per_context_token_s: FloatArray
    correction: FloatArray
    calibrated_until_s: FloatArray
    low_factor: FloatArray
    high_factor: FloatArray
    active_batch: IntArray
    active_context: IntArray
    incoming_batch: IntArray
    incoming_context: IntArray
    foreign_batch: IntArray
    foreign_context: IntArray
    promised_batch: FloatArray
    promised_context: FloatArray
    reserved_blocks: FloatArray
    capacity_blocks: FloatArray
    max_batch: FloatArray
    nic_bytes_per_s: FloatArray
    flows_in: FloatArray
    flows_out: FloatArray
    storage_bytes_per_s: FloatArray  # from the shared store; 0 where the worker reads for nobody
    storage_wait_s: FloatArray
    accepts: BoolArray

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[WorkerId, dict[RequestId, Reservation]] = {}
        self._joined_step_s: tuple[int, FloatArray] | None = None

    def join(self, spec: WorkerSpec, slot: int) -> None:
        profile = spec.profile
        values: dict[str, float] = {
            "slot": slot,
            "base_s": profile.decode_base_s,
            "per_sequence_s": profile.decode_per_sequence_s,
            "per_context_token_s": profile.decode_per_context_token_s,
            "correction": 1.0,
            "calibrated_until_s": -math.inf,
            "low_factor": 1.0,
            "high_factor": 1.0,
            "capacity_blocks": spec.capacity_blocks.get(Tier.DEVICE, math.inf),
            "max_batch": spec.max_batch,
            "nic_bytes_per_s": math.inf if spec.nic_bytes_per_s is None else spec.nic_bytes_per_s,
            "accepts": spec.role is not Role.PREFILL,
            "storage_bytes_per_s": _storage_bytes_per_s(spec),
        }
        self._insert(spec, values)
        self._held[spec.id] = {}
        self._joined_step_s = None

    def leave(self, worker: WorkerId) -> None:
        self._delete(worker)
        del self._held[worker]
        self._joined_step_s = None

    def joined_step_s(self, context_tokens: int) -> FloatArray:
        """Length of one decode step on each worker once a request of `context_tokens` has joined. Not to be written to."""
        kept = self._joined_step_s
        if kept is not None and kept[0] == context_tokens:
            return kept[1]
        batch_s: FloatArray = self.per_sequence_s * (self.promised_batch + 1.0)
        batch_s += self.base_s
        batch_s += self.per_context_token_s * (self.promised_context + float(context_tokens))
        batch_s *= self.correction
        self._joined_step_s = context_tokens, batch_s
        return batch_s

    def recalibrate(self, worker: WorkerId, correction: float, log_error: float) -> None:
        """Correct the steps of a worker."""
        row, self._joined_step_s = self.row[worker], None
        self.correction[row] = correction
        self.low_factor[row], self.high_factor[row] = math.exp(-log_error), math.exp(log_error)

    def reserve(self, worker: WorkerId, request: RequestId, blocks: int, context_tokens: int) -> None:
        row = self.row[worker]
        self._held[worker][request] = Reservation(blocks, context_tokens)
        self.reserved_blocks[row] += blocks
        self.incoming_batch[row] += 1
        self.incoming_context[row] += context_tokens
        self._promise(row, 1, context_tokens)

    def activate(self, worker: WorkerId, request: RequestId, until_s: float) -> None:
        """The request decodes from here on."""
        reservation = self._held[worker].get(request)
        if reservation is None or reservation.active:
            return
        reservation.active, reservation.until_s = True, until_s
        row = self.row[worker]
        self.incoming_batch[row] -= 1
        self.incoming_context[row] -= reservation.context_tokens
        self.active_batch[row] += 1
        self.active_context[row] += reservation.context_tokens

    def release(self, worker: WorkerId, request: RequestId) -> None:
        reservation = self._held[worker].pop(request, None)
        if reservation is None:
            return
        row = self.row[worker]
        self.reserved_blocks[row] -= reservation.blocks
        batch, context = (
            (self.active_batch, self.active_context) if reservation.active else (self.incoming_batch, self.incoming_context)
        )
        batch[row] -= 1
        context[row] -= reservation.context_tokens
        self._promise(row, -1, -reservation.context_tokens)

    def report(self, worker: WorkerId, load: WorkerLoad) -> None:
        """Count what runs there without having been placed by this scheduler."""
        row = self.row[worker]
        own_batch = int(self.active_batch[row] + self.incoming_batch[row])
        own_context = int(self.active_context[row] + self.incoming_context[row])
        batch = max(0, load.decode_batch - own_batch)
        context = max(0, load.decode_context_tokens - own_context) if batch else 0
        self._promise(row, batch - int(self.foreign_batch[row]), context - int(self.foreign_context[row]))
        self.foreign_batch[row], self.foreign_context[row] = batch, context

    def step_s(self, worker: WorkerId) -> float:
        """The profile's uncorrected time of a step with what decodes there at present."""
        row = self.row[worker]
        batch = int(self.active_batch[row] + self.foreign_batch[row])
        context = int(self.active_context[row] + self.foreign_context[row])
        return self.specs[worker].profile.decode_step_s(batch, context)

    def _promise(self, row: int, batch: int, context_tokens: int) -> None:
        self._joined_step_s = None
        self.promised_batch[row] += batch
        self.promised_context[row] += context_tokens

    def check(self) -> None:
        super().check()
        self._check_reservations()
        kept = self._joined_step_s
        self._joined_step_s = None
        if kept is not None and not np.array_equal(kept[1], self.joined_step_s(kept[0])):
            raise InvariantError(f"steps {kept} are kept, but {self._joined_step_s} hold")

    def _check_reservations(self) -> None:
        batch = self.active_batch + self.incoming_batch + self.foreign_batch
        context = self.active_context + self.incoming_context + self.foreign_context
        if not (np.array_equal(self.promised_batch, batch) and np.array_equal(self.promised_context, context)):
            raise InvariantError(f"{self.promised_batch} requests are promised, {batch} are there")
        for worker, row in self.row.items():
            held = self._held[worker].values()
            expected = (
                sum(r.blocks for r in held),
                sum(r.active for r in held),
                sum(not r.active for r in held),
                sum(r.context_tokens for r in held if r.active),
                sum(r.context_tokens for r in held if not r.active),
            )
            columns = (self.reserved_blocks, self.active_batch, self.incoming_batch, self.active_context, self.incoming_context)
            if expected != tuple(column[row] for column in columns):
                raise InvariantError(f"I9: {worker} counts {[int(c[row]) for c in columns]}, its reservations say {expected}")


def _storage_bytes_per_s(spec: WorkerSpec) -> float:
    """How fast a decode worker reads from the shared store, if it has told; a coupled engine reads for itself."""
    listed = spec.profile.tier_bytes_per_s
    return listed[Tier.SHARED] if spec.role is Role.DECODE and len(listed) > Tier.SHARED else 0.0
