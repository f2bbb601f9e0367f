"""A scheduler driven by events, with brute-force models of workers, caches and requests beside it, that hear of the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

from conductor.core.commands import Command, StartPrefill, TransferBlocks
from conductor.core.events import (
    Event,
    FirstToken,
    HandoverFinished,
    PrefillFinished,
    PrefillStarted,
    RequestFinished,
    RequestResumed,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from conductor.core.prefix_index import PrefixIndex
from conductor.core.scheduler import Scheduler
from conductor.core.types import (
    FinishReason,
    Holder,
    Request,
    Role,
    Tier,
    TransferReason,
    WorkerId,
    WorkerSpec,
)
from tests.core.builders import BLOCK_TOKENS, PROFILE
from tests.core.shadow import ALL_BLOCKS, CacheReport, Ledger, ReportedCaches, ShadowWorker

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
ORPHAN_WAIT_S = 20.0
RESUME_TIMEOUT_S = 5.0
MAX_REPLICAS = 2


def pick(options: list[Any], number: int) -> Any:
    return options[number % len(options)]


class DrivenScheduler(RuleBasedStateMachine):
    """How events reach the scheduler and its twin, and what must hold of each answer. The rules are in the test."""

    index: PrefixIndex
    scheduler: Scheduler
    twin: Scheduler

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
        if command.source.tier is not Tier.DEVICE:  # of its node, which nobody else is on
            source = source.removeprefix("n-")
            assert source in self.draining, "what a node keeps is copied when it is given up"
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

    def deliver_lost(self, event: WorkerLost) -> None:
        name = event.worker_id
        if event.epoch >= self.joined.get(name, 0):
            self.joined.pop(name, None)
            self.draining.discard(name)
            self.reported.ends(name, event.epoch)
            self.forget_copies(name)
        self.tell(event)

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

    def resume(self, name: str, attempt: int) -> None:
        old = self.requests[name]
        request = replace(old, attempt=attempt, prompt_tokens=old.prompt_tokens + 3, emitted_tokens=old.emitted_tokens + 3)
        life = self.ledger.live[name]
        if life.interrupted and attempt == life.attempt + 1:
            self.requests[name] = request
        self.ledger.resume(name, attempt)
        self.tell(RequestResumed(request))

    def running(self) -> list[str]:
        return [name for name, life in self.ledger.live.items() if life.placement is not None]

    def claimed(self, name: WorkerId, tier: Tier) -> set[int]:
        holder = Holder(name if tier is Tier.DEVICE else f"n-{name}", tier)
        return {block for block in ALL_BLOCKS if holder in self.index.holders(block)}

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
