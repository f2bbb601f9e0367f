"""The whole scheduler under any interleaving of events, held against brute-force models of caches and requests.

After every event `check()` runs, and a second scheduler that sees time made monotonic, and keeps nothing of what it found out
before the event, has to answer the same (I6, I7, I17).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conductor.core.commands import Cancel, Command, RequestSnapshot, StartPrefill, TransferBlocks
from conductor.core.config import ADMISSIONS, CalibrationConfig, MigrationConfig, QueueConfig, SchedulerConfig
from conductor.core.events import (
    Event,
    FirstToken,
    HandoverFinished,
    LoadReported,
    PrefillFinished,
    PrefillStarted,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestResumed,
    Tick,
    TransferFailed,
    TransferFinished,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from conductor.core.policies import POLICIES
from conductor.core.prefix_index import PrefixIndex
from conductor.core.requests import Outcome
from conductor.core.scheduler import Scheduler
from conductor.core.types import (
    SLO,
    FinishReason,
    Holder,
    Priority,
    RejectReason,
    Request,
    Role,
    Tier,
    TransferReason,
    WorkerId,
    WorkerLoad,
    WorkerSpec,
)
from tests.core.builders import BLOCK_TOKENS, PROFILE
from tests.core.shadow import ALL_BLOCKS, DEPTH, FAMILIES, CacheReport, Ledger, ReportedCaches, ShadowWorker, chain

ROLES = {"c0": Role.COUPLED, "d0": Role.DECODE, "d1": Role.DECODE, "p0": Role.PREFILL, "p1": Role.PREFILL, "p2": Role.PREFILL}
SPECS = {
    name: WorkerSpec(
        id=name,
        role=role,
        node=f"n-{name}",
        profile=replace(
            PROFILE,
            chunk_tokens=256 if name == "p2" else None,
            packs_prompts=name in ("c0", "p2"),
            layer_groups=4 if name == "p1" else 1,
            first_token_after_handover=name == "p1",
        ),
        capacity_blocks={Tier.DEVICE: 40, Tier.HOST: 100},
        nic_bytes_per_s=None if name == "p2" else 1e10,
        max_batch=4,
        model={"p1": "other", "p2": "m"}.get(name, ""),
        rack=f"rack-{name[1]}",
    )
    for name, role in ROLES.items()
}
EXPENSIVE_REASONS = (RejectReason.TTFT_SLO, RejectReason.TBT_SLO, RejectReason.OVERLOAD)
MAX_STEPS_TO_THE_END = 400
ORPHAN_WAIT_S = 20.0
RESUME_TIMEOUT_S = 5.0
MAX_REPLICAS = 2

names = st.sampled_from(sorted(ROLES))
tiers = st.sampled_from((Tier.DEVICE, Tier.DEVICE, Tier.HOST))
numbers = st.integers(0, 1000)
deliveries = st.sampled_from(("at once", "at once", "at once", "later", "never", "twice"))


def pick(options: list[Any], number: int) -> Any:
    return options[number % len(options)]


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.workers = {name: ShadowWorker(name) for name in ROLES}
        self.joined: dict[WorkerId, int] = {}
        self.draining: set[WorkerId] = set()
        self.reported = ReportedCaches()
        self.ledger = Ledger()
        self.requests: dict[str, Request] = {}
        self.stash: list[CacheReport | WorkerJoined | WorkerLost] = []
        self.observed = 0
        self.copies: dict[str, TransferBlocks] = {}

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        admission=st.sampled_from(ADMISSIONS),
        late_binding=st.sampled_from((None, True, False)),
        max_requests=st.sampled_from((None, 2)),
        burst_window_s=st.sampled_from((0.0, 0.2)),
        ttft_s=st.sampled_from((None, 0.02, 1.0)),
        piece_blocks=st.sampled_from((3, 8192)),
        budget_bytes_per_s=st.sampled_from((0.0, 1e12, 1e12)),
        pack_backlog=st.sampled_from((0.0, 1.0)),
        everybody_leaves=st.booleans(),
        there=st.sampled_from((("p0", "d0"), ("c0", "d0", "d1", "p0", "p1", "p2"))),
    )
    def configure(
        self,
        policy: str,
        admission: str,
        late_binding: bool | None,
        max_requests: int | None,
        burst_window_s: float,
        ttft_s: float | None,
        piece_blocks: int,
        budget_bytes_per_s: float,
        pack_backlog: float,
        everybody_leaves: bool,
        there: tuple[WorkerId, ...],
    ) -> None:
        self.everybody_leaves = everybody_leaves
        queue = QueueConfig(
            max_requests=max_requests,
            burst_window_s=burst_window_s,
            max_wait_s=2.0,
            look_ahead=3,
            pack_backlog=pack_backlog,
            orphan_wait_s=ORPHAN_WAIT_S,
        )
        config = SchedulerConfig(
            block_tokens=BLOCK_TOKENS,
            policy=policy,
            admission=admission,
            late_binding=late_binding,
            slo=SLO(ttft_s, 0.05 if ttft_s else None),
            max_attempts=3,
            snapshot_piece_blocks=piece_blocks,
            resume_timeout_s=RESUME_TIMEOUT_S,
            queue=queue,
            migration=MigrationConfig(budget_bytes_per_s, min_heat=0.5, max_replicas=MAX_REPLICAS),
            calibration=CalibrationConfig(min_observations=2),
        )
        self.index = PrefixIndex()
        self.scheduler = Scheduler(config, index=self.index)
        self.twin = Scheduler(config)
        for name in there:
            self.join(name)

    # how events reach the scheduler

    @staticmethod
    def forget_what_is_kept(scheduler: Scheduler) -> None:
        scheduler._assessor._kept = None
        scheduler._view.prefill._forget_rows()
        scheduler._view.decode._joined_step_s = None

    def tell(self, event: Event, backwards_s: float = 0.0) -> list[Command]:
        """Hand an event over, with a clock that may have gone back; the twin's never does."""
        commands = self.scheduler.handle(event, self.now - backwards_s)
        self.scheduler.check()
        self.forget_what_is_kept(self.twin)
        assert self.twin.handle(event, self.now) == commands, "I6, I7, I17: equal events in monotonic time, equal commands"
        for command in commands:
            self.ledger.obey(command, self.joined, self.joined.keys() - self.draining)
            if isinstance(command, StartPrefill):
                self.hold_placement(command)
            if isinstance(command, TransferBlocks):
                self.hold_copy(command)
        return commands

    def hold_copy(self, command: TransferBlocks) -> None:
        source, target = command.source.owner, command.target.owner
        assert {source, target} <= self.joined.keys()
        assert target not in self.draining
        assert source != target
        busy = any({source, target} & {copy.source.owner, copy.target.owner} for copy in self.copies.values())
        assert not busy or command.reason is TransferReason.DRAIN, "only a worker that goes may copy over a busy link"
        assert all(command.source in self.index.holders(block) for block in command.blocks), "I13: reported blocks are copied"
        assert command.target not in self.index.holders(command.blocks[-1])
        self.copies[command.transfer_id] = command

    def hold_placement(self, command: StartPrefill) -> None:
        placed, request = command.placement, self.requests[command.placement.request_id]
        assert 0 <= placed.reuse.reused_tokens < request.prompt_tokens, "I13: at least one token is left to compute"
        source = placed.reuse.source
        assert (source is None) == (placed.reuse.fetched_tokens == 0)
        if source is not None:
            assert source.owner in self.joined or source.owner in {f"n-{name}" for name in self.joined}
            assert source.owner != placed.prefill
            prefix = request.block_hashes[: placed.reuse.reused_tokens // BLOCK_TOKENS]
            assert all(source in self.index.holders(block) for block in prefix), "I13: reported blocks alone are fetched"
        assert not request.model or SPECS[placed.prefill].model in ("", request.model)
        if SPECS[placed.prefill].role is Role.COUPLED and placed.decode is not None:
            assert placed.decode == placed.prefill, "a coupled engine keeps what it prefills"

    def report(self, report: CacheReport, how: str) -> None:
        self.workers[report.stamp.source].sent.append(report)
        if how == "later":
            self.stash.append(report)
        elif how != "never":
            for _ in range(2 if how == "twice" else 1):
                self.deliver_report(report)

    def deliver_report(self, report: CacheReport) -> list[Command]:
        if report.stamp.source in self.joined:
            self.reported.take(report)
        return self.tell(report)

    # workers

    def join(self, name: WorkerId) -> list[Command]:
        worker = self.workers[name]
        worker.restart()
        return self.deliver_join(WorkerJoined(SPECS[name], worker.epoch))

    def deliver_join(self, event: WorkerJoined) -> list[Command]:
        name = event.worker.id
        if event.epoch > self.joined.get(name, 0):
            if name in self.joined:
                self.reported.ends(name, self.joined[name])
                self.forget_copies(name)
            if self.reported.begins(name, event.epoch):
                self.joined[name] = event.epoch
                self.draining.discard(name)
        return self.tell(event)

    def forget_copies(self, name: WorkerId) -> None:
        """Nothing more will be heard of copies from or to a worker whose life is over."""
        gone = [one for one, copy in self.copies.items() if name in (copy.source.owner, copy.target.owner)]
        for transfer_id in gone:
            del self.copies[transfer_id]

    @rule(
        name=names, change=st.sampled_from(("starts", "starts", "starts late", "is lost", "is lost in a former life", "drains"))
    )
    def a_worker_comes_or_goes(self, name: WorkerId, change: str) -> None:
        worker = self.workers[name]
        if change == "drains":
            self.draining |= {name} & self.joined.keys()
            self.tell(WorkerDraining(name))
        elif change.startswith("is lost"):
            self.deliver_lost(WorkerLost(name, max(worker.epoch - (change != "is lost"), 0)))
        else:
            if worker.epoch:
                self.stash.append(WorkerLost(name, worker.epoch))
            if change == "starts":
                self.join(name)
            else:
                worker.restart()
                self.stash.append(WorkerJoined(SPECS[name], worker.epoch))

    def deliver_lost(self, event: WorkerLost) -> None:
        name = event.worker_id
        if event.epoch >= self.joined.get(name, 0):
            self.joined.pop(name, None)
            self.draining.discard(name)
            self.reported.ends(name, event.epoch)
            self.forget_copies(name)
        self.tell(event)

    @rule(name=names, remaining_s=st.sampled_from((0.0, 0.5)), tokens=st.sampled_from((0, 3000)), batch=st.integers(0, 3))
    def a_worker_reports_its_load(self, name: WorkerId, remaining_s: float, tokens: int, batch: int) -> None:
        load = WorkerLoad(1, tokens, remaining_s, batch, batch * 500, 5)
        self.tell(LoadReported(name, self.workers[name].epoch, load))

    # caches

    @rule(
        name=names,
        tier=tiers,
        change=st.sampled_from(("stored", "stored", "evicted", "cleared", "told")),
        family=st.integers(0, FAMILIES - 1),
        depth=st.integers(1, DEPTH),
        how=deliveries,
    )
    def a_cache_changes(self, name: WorkerId, tier: Tier, change: str, family: int, depth: int, how: str) -> None:
        worker = self.workers[name]
        if change == "stored":
            self.report(worker.store(tier, chain(family, depth)), how)
        elif change == "evicted":
            self.report(worker.evict(tier, chain(family)[depth - 1]), how)
        elif change == "cleared":
            self.report(worker.clear(tier), how)
        else:
            self.report(worker.snapshot(), how)

    @precondition(lambda self: self.stash)
    @rule(number=numbers)
    def something_comes_late(self, number: int) -> None:
        event = self.stash.pop(number % len(self.stash))
        if isinstance(event, WorkerLost):
            self.deliver_lost(event)
        elif isinstance(event, WorkerJoined):
            self.deliver_join(event)
        else:
            self.deliver_report(event)

    @rule(name=names, number=numbers)
    def an_old_report_comes_again(self, name: WorkerId, number: int) -> None:
        if self.workers[name].sent:
            self.deliver_report(pick(self.workers[name].sent, number))

    @rule(name=names)
    def a_worker_is_followed_again(self, name: WorkerId) -> None:
        """Whatever was lost: after the next report and the snapshot that it leads to, belief and truth agree (I14)."""
        if name not in self.joined or self.joined[name] != self.workers[name].epoch:
            return
        worker = self.workers[name]
        self.deliver_report(worker.evict(Tier.DEVICE, 0))
        deadline = self.scheduler.next_deadline()
        if deadline is not None:
            self.now = max(self.now, deadline, self.now + 2.5)
            asked = [one for one in self.tell(Tick()) if isinstance(one, RequestSnapshot) and one.source == name]
            if asked:
                self.deliver_report(worker.snapshot())
        while self.scheduler._reports._intakes:
            self.the_deadline_comes()
        for tier in (Tier.DEVICE, Tier.HOST):
            assert self.claimed(name, tier) == worker.caches.get(tier, set())

    @precondition(lambda self: self.copies)
    @rule(number=numbers, fails=st.booleans())
    def a_copy_ends(self, number: int, fails: bool) -> None:
        """Its blocks are reported by the target if it succeeds. It may be told twice."""
        copy = self.copies.pop(pick(sorted(self.copies), number))
        name = copy.target.owner
        if not fails and name in self.joined:
            self.report(self.workers[name].store(Tier.DEVICE, copy.blocks), "at once")
        end = TransferFailed(copy.transfer_id, "link down") if fails else TransferFinished(copy.transfer_id, 5, 0.1)
        for _ in range(1 + number % 2):
            self.tell(end)

    # requests

    @rule(first=st.integers(0, 8), requests=st.integers(2, 5), family=st.integers(0, FAMILIES - 1), count=st.integers(2, DEPTH))
    def a_burst_arrives(self, first: int, requests: int, family: int, count: int) -> None:
        """Several requests of one conversation at one moment, and a turn for the line."""
        for number in range(first, first + requests):
            self.a_request_arrives(number, family, count, 1, "", Priority.NORMAL)
        self.tell(Tick())

    @rule(
        number=st.integers(0, 12),
        family=st.integers(0, FAMILIES - 1),
        count=st.integers(0, DEPTH),
        tail=st.sampled_from((0, 1, 63)),
        model=st.sampled_from(("", "", "m", "other", "unknown")),
        priority=st.sampled_from(Priority),
    )
    def a_request_arrives(self, number: int, family: int, count: int, tail: int, model: str, priority: Priority) -> None:
        name = f"r{number}"
        tokens = max(1, count * BLOCK_TOKENS + tail)
        request = Request(name, tokens, chain(family, count), max_output_tokens=200, model=model, priority=priority)
        if name not in self.ledger.live:
            self.requests[name] = request
        self.ledger.arrive(name)
        self.tell(RequestArrived(request))

    @precondition(lambda self: self.running())
    @rule(
        number=numbers,
        compute_s=st.sampled_from((0.01, 0.05, 0.06, 1.0)),
        warmup=st.booleans(),
        kept=st.sampled_from((1.0, 1.0, 0.0)),
    )
    def a_request_gets_on(self, number: int, compute_s: float, warmup: bool, kept: float) -> None:
        """The whole way of one request's attempt, as far as the draw goes. Not every claim about a cache proves true."""
        placed = self.ledger.live[pick(self.running(), number)].placement
        assert placed is not None
        steps = list(self.progress(placed.request_id, compute_s, warmup, kept))[: 1 + number % 5]
        for event in steps:
            self.advance(event)

    @precondition(lambda self: self.running())
    @rule(compute_s=st.sampled_from((0.05, 0.06)), kept=st.sampled_from((1.0, 1.0, 0.0)))
    def all_prompts_are_computed(self, compute_s: float, kept: float) -> None:
        """Whatever has been placed gets as far as its first token."""
        for name in self.running():
            for event in list(self.progress(name, compute_s, kept=kept))[:4]:
                self.advance(event)

    @precondition(lambda self: self.running())
    @rule(number=numbers)
    def a_worker_fails_a_request(self, number: int) -> None:
        """One of its workers cannot go on with it; the front end answers with the continuation."""
        name = pick(self.running(), number)
        life = self.ledger.live[name]
        assert life.placement is not None
        self.tell(RequestFailed(name, life.attempt, life.placement.prefill, "out of memory"))
        if number % 2 and name in self.ledger.live and self.ledger.live[name].interrupted:
            self.resume(name, life.attempt + 1)

    def progress(self, name: str, compute_s: float, warmup: bool = False, kept: float = 1.0) -> Iterator[Event]:
        placed = self.ledger.live[name].placement
        assert placed is not None
        reused = int(placed.reuse.reused_tokens * kept)
        yield PrefillStarted(name, placed.attempt, placed.prefill)
        yield PrefillFinished(name, placed.attempt, placed.prefill, reused, compute_s, warmup)
        yield HandoverFinished(name, placed.attempt, 1000, 0.01)
        yield FirstToken(name, placed.attempt)
        yield RequestFinished(name, placed.attempt, 50, FinishReason.LENGTH)

    def advance(self, event: Event) -> list[Command]:
        if isinstance(event, PrefillFinished):
            self.observed += not event.warmup
            running = self.ledger.live.get(event.request_id)
            if running is not None and running.placement is not None and event.worker_id in self.joined:
                self.report(
                    self.workers[event.worker_id].store(Tier.DEVICE, self.requests[event.request_id].block_hashes), "at once"
                )
        if isinstance(event, RequestFinished):
            outcome = {FinishReason.CANCELLED: "cancelled", FinishReason.FAILED: "failed"}.get(event.reason, "finished")
            self.ledger.finish(event.request_id, event.attempt, outcome)
        return self.tell(event)

    @rule(number=st.integers(0, 12), attempt=st.integers(1, 3), name=names, kind=st.integers(0, 6))
    def a_stray_event_comes(self, number: int, attempt: int, name: WorkerId, kind: int) -> None:
        """Late, early, repeated, of a former attempt, or about nobody."""
        one = f"r{number}"
        events: tuple[Event, ...] = (
            PrefillStarted(one, attempt, name),
            PrefillFinished(one, attempt, name, 0, 0.05),
            HandoverFinished(one, attempt, 1000, 0.01),
            FirstToken(one, attempt),
            RequestFinished(one, attempt, 7, pick(list(FinishReason), number)),
            RequestFailed(one, attempt, name, "out of memory"),
            pick([TransferFinished("copy-99", 5, 0.1), TransferFailed("t1", "link down")], number),
        )
        self.advance(events[kind])

    @rule(number=st.integers(0, 12))
    def a_client_leaves(self, number: int) -> None:
        life = self.ledger.live.get(f"r{number}")
        self.ledger.cancel(f"r{number}")
        commands = self.tell(RequestCancelled(f"r{number}"))
        told = [command for command in commands if isinstance(command, Cancel)]
        assert bool(told) == (life is not None and life.placement is not None)

    @rule(number=st.integers(0, 12), attempt=st.sampled_from((None, None, None, 2)))
    def a_continuation_comes(self, number: int, attempt: int | None) -> None:
        name = f"r{number}"
        life = self.ledger.live.get(name)
        if name in self.requests and life is not None:
            self.resume(name, life.attempt + 1 if attempt is None else attempt)

    def resume(self, name: str, attempt: int) -> None:
        old = self.requests[name]
        request = replace(old, attempt=attempt, prompt_tokens=old.prompt_tokens + 3, emitted_tokens=old.emitted_tokens + 3)
        life = self.ledger.live[name]
        if life.interrupted and attempt == life.attempt + 1:
            self.requests[name] = request
        self.ledger.resume(name, attempt)
        self.tell(RequestResumed(request))

    # time

    @rule(seconds=st.sampled_from((0.001, 0.05, 1.0, 40.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tell(Tick())

    @rule(seconds=st.sampled_from((0.5, 100.0)))
    def the_clock_goes_back(self, seconds: float) -> None:
        self.tell(Tick(), backwards_s=seconds)

    @rule()
    def the_deadline_comes(self) -> None:
        deadline = self.scheduler.next_deadline()
        if deadline is not None:
            self.now = max(self.now, deadline)
            self.tell(Tick())
            following = self.scheduler.next_deadline()
            assert following is None or following > deadline, "I15: a deadline that is answered must not come again"

    # what holds at any time

    def running(self) -> list[str]:
        return [name for name, life in self.ledger.live.items() if life.placement is not None]

    def claimed(self, name: WorkerId, tier: Tier) -> set[int]:
        holder = Holder(name if tier is Tier.DEVICE else f"n-{name}", tier)
        return {block for block in ALL_BLOCKS if holder in self.index.holders(block)}

    @invariant()
    def i1_arrived_are_ended_or_in_flight(self) -> None:
        table = self.scheduler._requests
        assert {state.request.id for state in table} == set(self.ledger.live)
        assert table.arrived == self.ledger.arrived == self.ledger.ended.total() + len(self.ledger.live)
        assert {outcome: self.ledger.ended[outcome] for outcome in Outcome} == table.ended

    @invariant()
    def i8_the_index_claims_only_what_was_reported(self) -> None:
        for name in ROLES:
            for tier in (Tier.DEVICE, Tier.HOST):
                assert self.claimed(name, tier) <= self.reported.may_claim(name, tier)
        owners = {owner for block in ALL_BLOCKS for owner in self.index.holders(block)}
        assert {owner.owner.removeprefix("n-") for owner in owners} <= set(self.joined)

    @invariant()
    def i9_nothing_is_held_when_nothing_is_in_flight(self) -> None:
        if self.running():
            return
        view = self.scheduler._view
        for column in ("pending_s", "jobs", "active_tokens"):
            assert not getattr(view.prefill, column).any(), column
        for column in ("reserved_blocks", "incoming_batch", "active_batch", "active_context"):
            assert not getattr(view.decode, column).any(), column
        sources = Counter(copy.source.owner for copy in self.copies.values())
        targets = Counter(copy.target.owner for copy in self.copies.values())
        for owner in [*ROLES, *(f"n-{name}" for name in ROLES)]:
            assert view.flows_out(owner) == sources[owner]
        for pool in (view.prefill, view.decode):
            assert pool.flows_out.tolist() == [sources[name] for name in pool.ids]
            assert pool.flows_in.tolist() == [targets[name] for name in pool.ids]

    @invariant()
    def i12_nothing_uncalibrated_rejects(self) -> None:
        if not self.observed:
            assert not [one for one in self.ledger.rejections if one.reason in EXPENSIVE_REASONS]

    def teardown(self) -> None:
        """Every request ends if the workers do their part, and then nothing is left of it (I9, I11, I16)."""
        if not hasattr(self, "scheduler"):
            return
        if self.everybody_leaves:
            self.wait_for_nobody()
        else:
            for name in ("d1", "p1", "p2"):
                self.join(name)
            for _ in range(MAX_STEPS_TO_THE_END):
                if self.ledger.live:
                    self.push_everybody_on()
        assert not self.ledger.live, "I16: a request waits for ever"
        self.i9_nothing_is_held_when_nothing_is_in_flight()
        self.now += 1000.0
        self.tell(Tick())
        match = self.index.match(chain(0))
        assert (match.depths == match.confirmed).all(), "I11: expectations do not outlive their time"

    def wait_for_nobody(self) -> None:
        """No worker is left, none comes back and no continuation comes: every request is given up, and that within bounds."""
        for name in list(self.joined):
            self.deliver_lost(WorkerLost(name, self.joined[name]))
        limit_s = self.now + max(RESUME_TIMEOUT_S, ORPHAN_WAIT_S)
        while self.ledger.live:
            deadline = self.scheduler.next_deadline()
            assert deadline is not None, "I16: a request waits, and nothing is due"
            assert deadline <= limit_s, "I16: a request waits for longer than is allowed"
            self.now = max(self.now, deadline)
            self.tell(Tick())

    def push_everybody_on(self) -> None:
        for name in self.running():
            for event in self.progress(name, 0.05):
                self.advance(event)
        for name in [name for name, life in self.ledger.live.items() if life.interrupted]:
            self.resume(name, self.ledger.live[name].attempt + 1)
        deadline = self.scheduler.next_deadline()
        if deadline is not None:
            self.now = max(self.now, deadline)
            self.tell(Tick())


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
