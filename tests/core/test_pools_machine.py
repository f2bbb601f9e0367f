"""Beliefs about prefill workers, decode workers, links and holders, against models of plain dicts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.core.cluster_view import SHARED_STORE, ClusterView, Flow
from conductor.core.prefill_pool import PrefillJob
from conductor.core.prefix_index import PrefixIndex
from conductor.core.types import Holder, Role, Tier, WorkerLoad, WorkerSpec
from tests.core.builders import PROFILE

ROLES = {"a": Role.PREFILL, "b": Role.COUPLED, "c": Role.DECODE, "d": Role.PREFILL}
NODES = {"a": "n1", "b": "n1", "c": "n2", "d": "n2"}
TIERS = {
    "a": (Tier.DEVICE, Tier.HOST),
    "b": (Tier.DEVICE, Tier.HOST, Tier.SHARED),
    "c": (Tier.DEVICE,),
    "d": (Tier.DEVICE, Tier.DISK),
}
SPECS = {
    name: WorkerSpec(
        name, role, NODES[name], PROFILE, {tier: 100 for tier in TIERS[name]}, max_batch=4, nic_bytes_per_s=3e10, model=name
    )
    for name, role in ROLES.items()
}
names = st.sampled_from(sorted(ROLES))
requests = st.sampled_from(["r1", "r2", "r3", "r4"])


@dataclass(slots=True)
class Worker:
    """A worker in plain values: prefill work in order of dispatch, and reservations (blocks, context, decoding)."""

    work: dict[str, tuple[float, int]] = field(default_factory=dict)
    ends_s: float = 0.0
    foreign_s: float = 0.0
    foreign_end_s: float = 0.0
    reserved: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    foreign: tuple[int, int] = (0, 0)
    accepts: bool = True


class ViewMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.view = ClusterView(self.index)
        self.workers: dict[str, Worker] = {}
        self.flows: list[tuple[str, str]] = []
        self.now = 0.0

    def prefills(self, name: str) -> bool:
        return name in self.workers and ROLES[name] is not Role.DECODE

    def decodes(self, name: str) -> bool:
        return name in self.workers and ROLES[name] is not Role.PREFILL

    # workers and links

    @rule(name=names)
    def join(self, name: str) -> None:
        if name not in self.workers:
            self.view.join(SPECS[name], 1)
            self.workers[name] = Worker()

    @rule(name=names)
    def leave(self, name: str) -> None:
        if self.workers.pop(name, None) is not None:
            self.view.leave(name)

    @rule(name=names)
    def drain(self, name: str) -> None:
        self.view.drain(name)
        if name in self.workers:
            self.workers[name].accepts = False

    @rule(source=st.sampled_from(["a", "b", "n1", SHARED_STORE]), into=names)
    def open_flow(self, source: str, into: str) -> None:
        self.flows.append((source, into))
        self.view.open_flow(Flow(source, into))

    @rule(number=st.integers(0, 20))
    def close_flow(self, number: int) -> None:
        if self.flows:
            self.view.close_flow(Flow(*self.flows.pop(number % len(self.flows))))

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # prefill work

    @rule(name=names, request=requests, work_s=st.integers(1, 4), tokens=st.integers(1, 500))
    def book(self, name: str, request: str, work_s: int, tokens: int) -> None:
        if self.prefills(name) and request not in self.workers[name].work:
            worker = self.workers[name]
            if not worker.work:
                worker.ends_s = self.now + work_s
            worker.work[request] = (float(work_s), tokens)
            self.view.prefill.book(name, request, PrefillJob(float(work_s), tokens), self.now)

    @rule(name=names, request=requests)
    def start(self, name: str, request: str) -> None:
        if self.prefills(name):
            worker = self.workers[name]
            if next(iter(worker.work), None) == request:
                worker.ends_s = self.now + worker.work[request][0]
            self.view.prefill.started(name, request, self.now)

    @rule(name=names, request=requests)
    def finish(self, name: str, request: str) -> None:
        if self.prefills(name):
            worker = self.workers[name]
            first = next(iter(worker.work), None) == request
            worker.work.pop(request, None)
            if first:
                worker.ends_s = self.now + next(iter(worker.work.values()), (0.0, 0))[0]
            self.view.prefill.release(name, request, self.now)

    @rule(name=names, remaining_s=st.sampled_from([0.0, 2.0]), tokens=st.sampled_from([0, 100, 2000]), batch=st.integers(0, 4))
    def report(self, name: str, remaining_s: float, tokens: int, batch: int) -> None:
        load = WorkerLoad(0, tokens, remaining_s, batch, batch * 300)
        if self.prefills(name):
            worker = self.workers[name]
            worker.ends_s = self.now + remaining_s if remaining_s else worker.ends_s
            worker.foreign_s = max(0, tokens - sum(count for _, count in worker.work.values())) * PROFILE.prefill_per_token_s
            worker.foreign_end_s = max(worker.ends_s, self.now) + worker.foreign_s
            self.view.prefill.report(name, load, self.now)
        if self.decodes(name):
            worker = self.workers[name]
            more = max(0, batch - len(worker.reserved))
            context = max(0, batch * 300 - sum(held[1] for held in worker.reserved.values())) if more else 0
            worker.foreign = (more, context)
            self.view.decode.report(name, load)

    # decode capacity

    @rule(name=names, request=requests, blocks=st.integers(1, 30), context=st.integers(1, 900))
    def reserve(self, name: str, request: str, blocks: int, context: int) -> None:
        if self.decodes(name) and request not in self.workers[name].reserved:
            self.workers[name].reserved[request] = (blocks, context, False)
            self.view.decode.reserve(name, request, blocks, context)

    @rule(name=names, request=requests)
    def activate(self, name: str, request: str) -> None:
        if self.decodes(name):
            self.view.decode.activate(name, request, self.now)
            held = self.workers[name].reserved
            if request in held:
                held[request] = (*held[request][:2], True)

    @rule(name=names, request=requests)
    def release(self, name: str, request: str) -> None:
        if self.decodes(name):
            self.workers[name].reserved.pop(request, None)
            self.view.decode.release(name, request)

    # what holds

    @invariant()
    def rows_are_the_workers_in_order(self) -> None:
        self.view.check()
        assert list(self.view.prefill.ids) == [name for name in sorted(self.workers) if self.prefills(name)]
        assert list(self.view.decode.ids) == [name for name in sorted(self.workers) if self.decodes(name)]
        assert set(self.view.epochs) == set(self.workers)

    @invariant()
    def queues_are_sums_over_the_work(self) -> None:
        queue_s = self.view.prefill.queue_s(self.now)
        for row, name in enumerate(self.view.prefill.ids):
            worker = self.workers[name]
            waiting_s = sum(work_s for work_s, _ in list(worker.work.values())[1:])
            expected_s = (
                max(worker.ends_s - self.now, 0.0)
                + waiting_s
                + min(worker.foreign_s, max(worker.foreign_end_s - self.now, 0.0))
            )
            assert abs(queue_s[row] - expected_s) < 1e-9
            assert abs(self.view.prefill.worker_queue_s(name, self.now) - expected_s) < 1e-9
            assert set(self.view.prefill._work[name]) == set(worker.work)
            assert self.view.prefill.accepts[row] == worker.accepts

    @invariant()
    def capacity_is_the_sum_of_reservations(self) -> None:
        pool = self.view.decode
        for row, name in enumerate(pool.ids):
            held = self.workers[name].reserved
            assert pool.reserved_blocks[row] == sum(blocks for blocks, _, _ in held.values())
            assert pool.active_batch[row] == sum(active for *_, active in held.values())
            assert pool.incoming_context[row] == sum(context for _, context, active in held.values() if not active)
            assert (pool.foreign_batch[row], pool.foreign_context[row]) == self.workers[name].foreign
            assert set(pool._held[name]) == set(held)
        batches = [len(self.workers[name].reserved) + self.workers[name].foreign[0] for name in pool.ids]
        contexts = [
            sum(context for _, context, _ in self.workers[name].reserved.values()) + self.workers[name].foreign[1]
            for name in pool.ids
        ]
        for joining in (100, 200):
            steps_s = [
                PROFILE.decode_step_s(batch + 1, context + joining) for batch, context in zip(batches, contexts, strict=True)
            ]
            assert pool.joined_step_s(joining).tolist() == pytest.approx(steps_s)

    @invariant()
    def models_are_served_by_those_who_say_so(self) -> None:
        for pool in (self.view.prefill, self.view.decode):
            for model in ROLES:
                assert pool.serving(model).tolist() == [name == model for name in pool.ids]

    @invariant()
    def links_count_the_transfers_on_them(self) -> None:
        for pool in (self.view.prefill, self.view.decode):
            for row, name in enumerate(pool.ids):
                assert pool.flows_in[row] == sum(target == name for _, target in self.flows)
                assert pool.flows_out[row] == sum(source == name for source, _ in self.flows)
        inbound = {name: min(3e10 / (1 + sum(t == name for _, t in self.flows)), 1e10) for name in self.view.prefill.ids}
        assert self.view.prefill.inbound_bytes_per_s().tolist() == list(inbound.values())
        for owner in ("a", "n1", SHARED_STORE):
            assert self.view.flows_out(owner) == sum(source == owner for source, _ in self.flows)

    @invariant()
    def holders_are_those_of_the_workers(self) -> None:
        """A node's tiers live as long as any worker of the node; the shared store for ever, once known."""
        known = set(self.view.holder_of_slot.values()) - {Holder(SHARED_STORE, Tier.SHARED)}
        own = {Holder(name, Tier.DEVICE) for name in self.workers}
        lower = {
            Holder(NODES[name], tier)
            for name in self.workers
            if self.prefills(name)
            for tier in TIERS[name]
            if tier in (Tier.HOST, Tier.DISK)
        }
        assert own | lower <= known
        assert {holder.owner for holder in known} <= set(self.workers) | {NODES[name] for name in self.workers}


TestViewMachine = ViewMachine.TestCase
TestViewMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
