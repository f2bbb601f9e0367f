"""A cluster with a truth of its own around a scheduler: prefill workers work first come first served, in virtual time.

What the scheduler believes comes from the workers' profiles; how long things really take comes from `truth`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
)
from conductor.core.scheduler import Scheduler
from conductor.core.types import FinishReason, Placement, Rejection, Request, Stamp, Tier
from tests.core.builders import cluster


@dataclass(slots=True)
class Served:
    """What came of a run: commands as they were given, true TTFT by request, refusals, and requests that finished."""

    log: list[tuple[float, Event, list[Command]]] = field(default_factory=list)
    ttft_s: dict[str, float] = field(default_factory=dict)
    rejections: list[Rejection] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)


class World:
    def __init__(self, config: SchedulerConfig, belief: CostProfile, truth: CostProfile, workers: tuple[int, int]) -> None:
        self.scheduler = Scheduler(config)
        self.truth = truth
        self.served = Served()
        self._requests: dict[str, Request] = {}
        self._arrived_s: dict[str, float] = {}
        self._free_s: dict[str, float] = {}
        self._seqs: dict[str, int] = {}
        self._heap: list[tuple[float, int, Event]] = []
        self._numbers = 0
        self._now = 0.0
        for event in cluster(*workers, profile=belief):
            self._plan(0.0, event)

    def run(self, arrivals: Sequence[tuple[float, Request]]) -> Served:
        """Serve requests that arrive at the given times until nothing is left to happen."""
        for arrival_s, request in arrivals:
            self._requests[request.id], self._arrived_s[request.id] = request, arrival_s
            self._plan(arrival_s, RequestArrived(request))
        while self._heap or self.scheduler.next_deadline() is not None:
            deadline = self.scheduler.next_deadline()
            if deadline is not None and (not self._heap or deadline <= self._heap[0][0]):
                self._step(deadline, Tick())
            else:
                now, _, event = heapq.heappop(self._heap)
                self._step(now, event)
        return self.served

    def _plan(self, at_s: float, event: Event) -> None:
        self._numbers += 1
        heapq.heappush(self._heap, (at_s, self._numbers, event))

    def _step(self, at_s: float, event: Event) -> None:
        now = self._now = max(self._now, at_s)
        if isinstance(event, BlocksStored):
            source = event.stamp.source
            self._seqs[source] = self._seqs.get(source, 0) + 1
            event = replace(event, stamp=Stamp(source, 1, self._seqs[source]))
        commands = self.scheduler.handle(event, now)
        self.served.log.append((now, event, commands))
        if isinstance(event, FirstToken):
            self.served.ttft_s[event.request_id] = now - self._arrived_s[event.request_id]
        if isinstance(event, RequestFinished):
            self.served.finished.append(event.request_id)
        for command in commands:
            if isinstance(command, Reject):
                self.served.rejections.append(command.rejection)
            elif isinstance(command, StartPrefill):
                self._serve(command.placement, now)

    def _serve(self, placed: Placement, now: float) -> None:
        """Plan everything that will really happen to a placed request."""
        name, attempt, request = placed.request_id, placed.attempt, self._requests[placed.request_id]
        start_s = max(now, self._free_s.get(placed.prefill, 0.0))
        compute_s = self.truth.prefill_s(request.prompt_tokens, placed.reuse.reused_tokens)
        fetch_s = placed.reuse.fetched_tokens * self.truth.kv_bytes_per_token / self.truth.transfer_bytes_per_s
        end_s = self._free_s[placed.prefill] = start_s + fetch_s + compute_s
        step_s = self.truth.decode_step_s(1, request.prompt_tokens)
        done_s = end_s + step_s * request.max_output_tokens
        stored = BlocksStored(Stamp(placed.prefill, 1, 1), Tier.DEVICE, None, request.block_hashes)
        self._plan(start_s, PrefillStarted(name, attempt, placed.prefill))
        self._plan(end_s, stored)
        self._plan(end_s, PrefillFinished(name, attempt, placed.prefill, placed.reuse.reused_tokens, compute_s))
        self._plan(end_s, FirstToken(name, attempt))
        self._plan(end_s, HandoverFinished(name, attempt, 1, 0.001))
        self._plan(done_s, RequestFinished(name, attempt, request.max_output_tokens, FinishReason.LENGTH))
