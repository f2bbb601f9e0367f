"""The scheduler's belief about the cluster: who is there, what each has to do, and what moves on which link.

Belief is never the truth: `queue` and `reservations` count what the scheduler has itself dispatched from the moment it did so
(expected), and reports correct them (confirmed). What workers hold in their caches is the prefix index's business; the
view only knows the index slots of each worker's caches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from conductor.core.commands import Command
from conductor.core.decode_pool import DecodePool
from conductor.core.events import LinkMeasured, LoadReported
from conductor.core.links import Links
from conductor.core.prefill_pool import PrefillPool, tier_bytes_per_s
from conductor.core.prefix_index import PrefixIndex
from conductor.core.storage_links import StorageLinks
from conductor.core.trust import Trust
from conductor.core.types import SHARED_STORE, Holder, InvariantError, Role, Tier, WorkerId, WorkerSpec

LOWER_TIERS = {Tier.HOST: "host_slot", Tier.DISK: "disk_slot", Tier.SHARED: "shared_slot"}
"""The tiers that a worker restores from, with the column of their index slots."""

EMPTY = Holder("", Tier.DEVICE)
"""A holder that never holds anything: the slot of a tier that a worker does not have."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A transfer in flight: from one owner of blocks (worker, node or shared store) into a worker."""

    source: str
    target: WorkerId


class ClusterView:
    def __init__(self, index: PrefixIndex, relayed_reads: str = "other_host") -> None:
        self.prefill = PrefillPool()
        self.decode = DecodePool()
        self.epochs: dict[WorkerId, int] = {}
        self.specs: dict[WorkerId, WorkerSpec] = {}
        self.holder_of_slot: dict[int, Holder] = {}
        self._slot_of_holder: dict[Holder, int] = {}
        self._index = index
        self._flows: dict[Flow, int] = {}
        self._flows_out: dict[str, int] = {}
        self._tier_bytes_per_s: dict[Holder, float] = {}
        self._empty_slot = index.add(EMPTY)
        self.links = Links(self.prefill)
        self.storage = StorageLinks(self.prefill, self.decode, self.links, relayed_reads)

    def join(self, spec: WorkerSpec, epoch: int) -> None:
        self.epochs[spec.id] = epoch
        self.specs[spec.id] = spec
        slot = self.know_holder(Holder(spec.id, Tier.DEVICE))
        if spec.role is not Role.DECODE:
            slots = {
                name: self.know_holder(self.holder(spec.id, tier)) if tier in spec.capacity_blocks else self._empty_slot
                for tier, name in LOWER_TIERS.items()
            }
            self.prefill.join(spec, {"slot": slot, **slots})
        if spec.role is not Role.PREFILL:
            self.decode.join(spec, slot)
        for tier in spec.capacity_blocks.keys() & LOWER_TIERS.keys():
            self._tier_bytes_per_s[self.holder(spec.id, tier)] = tier_bytes_per_s(spec, tier)
        self._list_lower_holders()
        self._restore_flow_counts(spec.id)
        self.storage.joined(spec)

    def leave(self, worker: WorkerId) -> None:
        del self.epochs[worker]
        spec = self.specs.pop(worker)
        self.links.forget(worker)
        if worker in self.prefill:
            self.prefill.leave(worker)
        if worker in self.decode:
            self.decode.leave(worker)
        self.forget_holder(Holder(worker, Tier.DEVICE))
        if not any(other.node == spec.node for other in self.specs.values()):
            self.forget_holder(Holder(spec.node, Tier.HOST))
            self.forget_holder(Holder(spec.node, Tier.DISK))
        self._list_lower_holders()

    def link_measured(self, event: LinkMeasured, now: float) -> list[Command]:
        """The estimates of transfers to this worker follow; a former life of it measured another process."""
        if self.epochs.get(event.worker_id) == event.epoch:
            self.links.observe(event)
        return []

    def load_reported(self, event: LoadReported, now: float) -> list[Command]:
        worker = event.worker_id
        if self.epochs.get(worker) != event.epoch:
            return []
        if worker in self.prefill:
            self.prefill.report(worker, event.load, now)
        if worker in self.decode:
            self.decode.report(worker, event.load)
        for report in event.tiers:
            if report.read_bytes_per_s is not None and report.tier in LOWER_TIERS:
                self._tier_bytes_per_s[self.holder(worker, report.tier)] = report.read_bytes_per_s
                if worker in self.prefill:
                    self.prefill.tier_was_read(worker, report.tier, report.read_bytes_per_s)
                if report.tier is Tier.SHARED:
                    self.storage.was_read(worker, report.read_bytes_per_s)
                self.prefill.links_changed()
        return []

    def drain(self, worker: WorkerId) -> None:
        for pool in (self.prefill, self.decode):
            if worker in pool:
                pool.accepts[pool.row[worker]] = False
        self.prefill.links_changed()

    def holder(self, source: str, tier: Tier) -> Holder:
        """Where blocks lie that `source` reports in `tier`: a worker's lower tiers are its node's, the shared store is one."""
        if tier is Tier.SHARED:
            return Holder(SHARED_STORE, tier)
        spec = self.specs.get(source)
        return Holder(source if spec is None or tier is Tier.DEVICE else spec.node, tier)

    def forget_holder(self, holder: Holder) -> None:
        """Drop every claim of a holder that is gone (I8)."""
        slot = self._slot_of_holder.pop(holder, None)
        if slot is not None:
            del self.holder_of_slot[slot]
            self._tier_bytes_per_s.pop(holder, None)
            self._index.discard(holder)

    def flows_out(self, owner: str) -> int:
        return self._flows_out.get(owner, 0)

    def open_flow(self, flow: Flow) -> None:
        self._count(flow, 1)

    def close_flow(self, flow: Flow) -> None:
        self._count(flow, -1)

    def nic_bytes_per_s(self, owner: str) -> float:
        """Line rate of the link on which an owner of blocks sends; an owner without one of its own is not the bottleneck."""
        spec = self.specs.get(owner)
        return math.inf if spec is None or spec.nic_bytes_per_s is None else spec.nic_bytes_per_s

    def outbound_bytes_per_s(self, holder: Holder) -> float:
        """What a holder of blocks has left for one more transfer: a device pool of its worker's card, a lower tier of its own
        channel."""
        if holder.tier is Tier.DEVICE:
            whole = self.nic_bytes_per_s(holder.owner)
        else:
            whole = self._tier_bytes_per_s.get(holder, math.inf)
        return whole / (self._flows_out.get(holder.owner, 0) + 1)

    def copy_s(self, source: WorkerId, target: WorkerId, tokens: int) -> float:
        """Time to copy so many tokens between two device pools, at the links' full speed."""
        pool, links = self.prefill, self.links.outbound(source)
        row = pool.row[target]
        link_bytes_per_s = float((pool.link_bytes_per_s if links is None else links.bytes_per_s)[row])
        latency_s = float((pool.latency_s if links is None else links.latency_s)[row])
        speed = min(float(pool.nic_bytes_per_s[row]), link_bytes_per_s)
        return latency_s + self.specs[target].profile.moved_bytes(tokens) / speed

    def describe(self, now: float, trust: Trust) -> dict[WorkerId, dict[str, Any]]:
        """What is believed of each worker, as JSON values."""
        described: dict[WorkerId, dict[str, Any]] = {}
        for worker in sorted(self.specs):
            values = described[worker] = {"links": self.links.describe(worker)}
            if worker in self.prefill:
                pool, row = self.prefill, self.prefill.row[worker]
                values |= {"trust": trust.level(worker).value, "kept_claims": trust.share(worker)}
                values |= {"prefill_queue_s": pool.worker_queue_s(worker, now), "prefill_jobs": int(pool.jobs[row])}
                values |= {"prefill_correction": float(pool.correction[row])}
                values |= {"prefill_calibrated": bool(pool.calibrated_until_s[row] >= now)}
            if worker in self.decode:
                decode, row = self.decode, self.decode.row[worker]
                values |= {"decode_requests": int(decode.active_batch[row] + decode.incoming_batch[row])}
                values |= {"decode_reserved_blocks": int(decode.reserved_blocks[row])}
                values |= {"decode_correction": float(decode.correction[row])}
                values |= {"decode_calibrated": bool(decode.calibrated_until_s[row] >= now)}
        return described

    def check(self) -> None:
        self.prefill.check()
        self.decode.check()
        self.storage.check()
        if set(self.specs) != set(self.prefill.ids) | set(self.decode.ids) or set(self.specs) != set(self.epochs):
            raise InvariantError(
                f"known workers {sorted(self.specs)} differ from the pools' {self.prefill.ids + self.decode.ids}"
            )
        if any(count <= 0 for count in self._flows.values()):
            raise InvariantError(f"transfers were closed more often than opened: {self._flows}")

    def know_holder(self, holder: Holder) -> int:
        """The index slot of a holder; from here on its blocks may be fetched."""
        slot = self._slot_of_holder.get(holder)
        if slot is None:
            slot = self._slot_of_holder[holder] = self._index.add(holder)
            self.holder_of_slot[slot] = holder
        return slot

    def _list_lower_holders(self) -> None:
        pool = self.prefill
        self.prefill.lower_holders = tuple(
            self.holder(worker, tier) if tier in pool.specs[worker].capacity_blocks else EMPTY
            for tier in LOWER_TIERS
            for worker in pool.ids
        )
        if all(holder is EMPTY for holder in pool.lower_holders):
            pool.lower_holders = ()

    def _count(self, flow: Flow, step: int) -> None:
        self._flows[flow] = self._flows.get(flow, 0) + step
        self._flows_out[flow.source] = self._flows_out.get(flow.source, 0) + step
        if not self._flows[flow]:
            del self._flows[flow]
        if not self._flows_out[flow.source]:
            del self._flows_out[flow.source]
        for pool in (self.prefill, self.decode):
            if flow.source in pool:
                pool.flows_out[pool.row[flow.source]] += step
            if flow.target in pool:
                pool.flows_in[pool.row[flow.target]] += step
        if flow.source == SHARED_STORE and flow.target in self.prefill:
            self.prefill.flows_stored[self.prefill.row[flow.target]] += step
        self.prefill.links_changed()

    def _restore_flow_counts(self, worker: WorkerId) -> None:
        """A worker may come back while transfers of its former life are still counted."""
        incoming = sum(count for flow, count in self._flows.items() if flow.target == worker)
        for pool in (self.prefill, self.decode):
            if worker in pool:
                pool.flows_in[pool.row[worker]] = incoming
                pool.flows_out[pool.row[worker]] = self.flows_out(worker)
        if worker in self.prefill:
            stored = self._flows.get(Flow(SHARED_STORE, worker), 0)
            self.prefill.flows_stored[self.prefill.row[worker]] = stored
        self.prefill.links_changed()
