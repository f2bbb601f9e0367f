"""The whole scheduler under any interleaving of events, held against brute-force models of caches and requests.

After every event `check()` runs, and a second scheduler that sees time made monotonic, and keeps nothing of what it found out
before the event, has to answer the same (I6, I7, I17).
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from conductor.core.commands import Cancel, RequestSnapshot
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
    Priority,
    RejectReason,
    Request,
    Tier,
    WorkerId,
    WorkerLoad,
)
from tests.core.builders import BLOCK_TOKENS
from tests.core.driven_scheduler import MAX_REPLICAS, ORPHAN_WAIT_S, RESUME_TIMEOUT_S, ROLES, SPECS, DrivenScheduler, pick
from tests.core.shadow import ALL_BLOCKS, DEPTH, FAMILIES, chain

EXPENSIVE_REASONS = (RejectReason.TTFT_SLO, RejectReason.TBT_SLO, RejectReason.OVERLOAD)
MAX_STEPS_TO_THE_END = 400

names = st.sampled_from(sorted(ROLES))
tiers = st.sampled_from((Tier.DEVICE, Tier.DEVICE, Tier.HOST))
numbers = st.integers(0, 1000)
deliveries = st.sampled_from(("at once", "at once", "at once", "later", "never", "twice"))


class SchedulerMachine(DrivenScheduler):
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

    # workers

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


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
