"""Requests, workers and whole clusters for the tests of the decision core, with defaults that a test overrides by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from conductor.core.commands import Command, Reject, StartPrefill
from conductor.core.config import SchedulerConfig
from conductor.core.cost_profile import CostProfile
from conductor.core.events import (
    BlocksStored,
    Event,
    FirstToken,
    HandoverFinished,
    PrefillFinished,
    PrefillStarted,
    RequestArrived,
    RequestFinished,
    Tick,
    WorkerJoined,
)
from conductor.core.scheduler import Scheduler
from conductor.core.types import FinishReason, Placement, RejectReason, Request, Role, Stamp, Tier, WorkerSpec

BLOCK_TOKENS = 64
PROFILE = CostProfile(
    prefill_base_s=0.01,
    prefill_per_token_s=1e-4,
    prefill_per_token2_s=0.0,
    decode_base_s=0.01,
    decode_per_sequence_s=0.001,
    decode_per_context_token_s=1e-7,
    kv_bytes_per_token=100_000,
    block_tokens=BLOCK_TOKENS,
    transfer_bytes_per_s=1e10,
    samples=100,
)


def blocks(count: int, name: int = 1, shared: int = 0) -> tuple[int, ...]:
    """`count` block hashes, the first `shared` of which are the same under every `name`."""
    return tuple(7_000_000 + depth if depth < shared else name * 1_000_000 + depth for depth in range(count))


def request(name: str = "r1", tokens: int = 640, own: int | None = None, shared: int = 0, **changes: Any) -> Request:
    """A request of `tokens`; `own` names its blocks after the first `shared` (default: by the digits of its id)."""
    number = int("".join(filter(str.isdigit, name)) or 0) if own is None else own
    hashes = blocks(tokens // BLOCK_TOKENS, number + 10, shared)
    return replace(Request(name, tokens, hashes, max_output_tokens=100), **changes)


def worker(name: str, role: Role, **changes: Any) -> WorkerSpec:
    spec = WorkerSpec(name, role, node=f"node-{name}", profile=PROFILE, capacity_blocks={Tier.DEVICE: 10_000})
    return replace(spec, **changes)


def cluster(prefill: int = 2, decode: int = 2, **changes: Any) -> list[WorkerJoined]:
    """Prefill workers p0, p1 ... and decode workers d0, d1 ... that join."""
    names = [(f"p{number}", Role.PREFILL) for number in range(prefill)]
    names += [(f"d{number}", Role.DECODE) for number in range(decode)]
    return [WorkerJoined(worker(name, role, **changes), epoch=1) for name, role in names]


AT_ONCE = SchedulerConfig(policy="conductor", late_binding=False)


def placements(commands: Sequence[Command]) -> list[Placement]:
    return [command.placement for command in commands if isinstance(command, StartPrefill)]


def refused(commands: Sequence[Command]) -> list[RejectReason]:
    return [command.rejection.reason for command in commands if isinstance(command, Reject)]


@dataclass(slots=True)
class Drive:
    """A scheduler and the time; checks every invariant after every event."""

    scheduler: Scheduler
    now: float = 0.0
    seqs: dict[str, int] | None = None

    def __call__(self, *events: Event, at: float | None = None) -> list[Command]:
        """Hand over `events` at time `at` (default: the present) and collect the answers."""
        self.now = self.now if at is None else at
        commands: list[Command] = []
        for event in events:
            commands += self.scheduler.handle(event, self.now)
            self.scheduler.check()
        return commands

    def settle(self, *events: Event, at: float | None = None) -> list[Command]:
        """Hand over `events`, and let whoever waits in the central line have a turn."""
        return self(*events, Tick(), at=at)

    def arrive(self, *requests: Request, at: float | None = None) -> list[Command]:
        return self(*(RequestArrived(one) for one in requests), at=at)

    def place(self, one: Request, at: float | None = None) -> Placement:
        """The placement of a request that is expected to be accepted at once."""
        (placed,) = placements(self.settle(RequestArrived(one), at=at))
        return placed

    def store(self, source: str, hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> list[Command]:
        """`source` reports a chain from the root on."""
        self.seqs = {} if self.seqs is None else self.seqs
        self.seqs[source] = self.seqs.get(source, 0) + 1
        return self(BlocksStored(Stamp(source, 1, self.seqs[source]), tier, None, tuple(hashes)))

    def prefilled(
        self, placed: Placement, compute_s: float, reused: int | None = None, at: float | None = None
    ) -> list[Command]:
        """The placement's prefill begins and ends, having taken `compute_s`."""
        end_s = self.now + compute_s if at is None else at
        tokens = placed.reuse.reused_tokens if reused is None else reused
        commands = self(PrefillStarted(placed.request_id, placed.attempt, placed.prefill))
        done = PrefillFinished(placed.request_id, placed.attempt, placed.prefill, tokens, compute_s)
        return commands + self(done, at=end_s)

    def decoded(self, placed: Placement, output_tokens: int, step_s: float) -> list[Command]:
        """Hand-over, first token and all others, `step_s` apart."""
        commands = self(HandoverFinished(placed.request_id, placed.attempt, 1, 0.001))
        commands += self(FirstToken(placed.request_id, placed.attempt))
        end = RequestFinished(placed.request_id, placed.attempt, output_tokens, FinishReason.LENGTH)
        return commands + self(end, at=self.now + step_s * (output_tokens - 1))


def drive(config: SchedulerConfig | None = None, joins: Sequence[Event] | None = None) -> Drive:
    """A scheduler whose cluster (default: 2 + 2 workers) has joined."""
    driven = Drive(Scheduler(config or SchedulerConfig(policy="local_cache_aware")))
    driven(*(cluster() if joins is None else joins))
    return driven
