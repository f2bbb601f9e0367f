"""A simulated prefill engine: chunked prefill over a block cache.

Every step computes at most `step_tokens` new tokens. Prompts in progress come first, then waiting ones in order of
submission while the step has tokens left and the pool has room for the whole prompt. A prompt reuses the blocks that the
cache holds when it is admitted, always leaving at least its last token to compute. A block can be reused from the step that
computes it on, since a step's attention sees the KV that the same step writes. Blocks stay pinned until the hand-over is done.

Blocks fetched for a waiting prompt are pinned too, but never keep the first in line out for good: when nobody else is here
whose room will become free, the last in line lets its blocks go.
"""

from __future__ import annotations

import bisect
import math
import random
from array import array
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from conductor.core.cost_profile import CostProfile
from conductor.core.events import PrefillFinished, PrefillStarted
from conductor.core.types import Tier, WorkerLoad
from traces.service_time import ServiceTime
from traces.sim.cache import BlockCache
from traces.sim.job import Job
from traces.sim.loop import At, EventLoop
from traces.sim.processors import Processors
from traces.sim.reporter import Reporter

StepStart: TypeAlias = Callable[[int, float], float]
"""Begins a step beside a number of decoding sequences that add some seconds to it; answers with its whole duration."""


class Slice(NamedTuple):
    """A job's part of one step: how many tokens, and the blocks that become known with them."""

    job: Job
    tokens: int
    added: list[int]


class StepLog:
    """When an engine computed: begin and end of every step, in order."""

    __slots__ = ("_begin_s", "_end_s")

    def __init__(self) -> None:
        self._begin_s = array("d")
        self._end_s = array("d")

    def add(self, begin_s: float, end_s: float) -> None:
        self._begin_s.append(begin_s)
        self._end_s.append(end_s)

    def done_s(self, from_s: float, work_s: float) -> float:
        """When `work_s` seconds of further work would have been done in the pauses between the steps after `from_s`."""
        begins, ends = self._begin_s, self._end_s
        step = bisect.bisect_right(begins, from_s)
        free_from_s = from_s if step == 0 else max(from_s, ends[step - 1])
        while step < len(begins) and work_s > begins[step] - free_from_s:
            work_s -= begins[step] - free_from_s
            free_from_s = ends[step]
            step += 1
        return free_from_s + work_s


class EngineLimits(NamedTuple):
    """What an engine announced of its speed, and its bounds.

    Without `chunked` a prompt is computed in one step however long it is; `hold_output` sets room aside for a request's output
    too, as an engine that also decodes must. `processors` are those that it shares with others.
    """

    profile: CostProfile
    step_tokens: int
    block_tokens: int
    max_batch: int
    reuse_blocks: bool = True
    chunked: bool = True
    hold_output: bool = False
    step_variation: float = 0.0
    seed: int = 0
    processors: Processors | None = None


class PrefillHooks(NamedTuple):
    """Called by the engine: a prompt enters its first step, is complete, or can never fit; room was freed.

    `gate`, where there is one, is asked for the next step and answers by calling back when the accelerator is free.
    """

    started: Callable[[Job], None]
    finished: Callable[[Job], None]
    refused: Callable[[Job, str], None]
    freed: Callable[[], None]
    gate: Callable[[StepStart], None] | None = None


class PrefillEngine:
    """Prefill side of one worker."""

    def __init__(
        self,
        loop: EventLoop,
        reporter: Reporter,
        cache: BlockCache,
        truth: ServiceTime,
        limits: EngineLimits,
        hooks: PrefillHooks,
    ) -> None:
        self.cache = cache
        self.busy_s = 0.0
        self.steps = StepLog()
        self._loop = loop
        self._reporter = reporter
        self._truth = truth
        self._previous_end_s = 0.0
        self._limits = limits
        self._hooks = hooks
        self._processors = limits.processors or Processors()
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._waiting_s = 0.0
        self._admitted: set[int] = set()
        self._blocked = False
        self._stepping = False
        self._begin_planned = False
        self._dead = False
        self._chance = random.Random(f"{limits.seed}:{reporter.source}:{reporter.epoch}")

    def submit(self, job: Job) -> None:
        """Queue a job whose fetched prefix (if any) lies in the cache. Earlier placements keep their turn."""
        bisect.insort(self._waiting, job, key=_order)
        job.ahead_s = self._left_s(job.placement.reuse.reused_tokens, job.prompt_tokens)
        self._waiting_s += job.ahead_s
        self._wake()

    @property
    def blocked(self) -> bool:
        """The first prompt in line waits for room."""
        return self._blocked and bool(self._waiting)

    def release(self, job: Job) -> None:
        """The job's KV has left: its blocks may be evicted."""
        if job.pinned or job.private_blocks or job.reserved_blocks:
            self._admitted.discard(job.order)
            self.cache.unpin(job.request.block_hashes[: job.pinned])
            self.cache.release_anonymous(job.private_blocks)
            self.cache.promised_blocks -= job.reserved_blocks
            job.pinned = job.private_blocks = job.reserved_blocks = 0
            self.room_freed()

    def room_freed(self) -> None:
        """Somebody let go of blocks in the cache."""
        self._wake()
        self._hooks.freed()

    def cancel(self, job: Job) -> None:
        """Forget a queued or complete job at once, one in the middle of a step when that ends."""
        job.cancelled = True
        if job in self._waiting:
            self._leave_line(job)
        elif job in self._running:
            if job.begun_tokens > job.done_tokens:
                return
            self._running.remove(job)
        self.release(job)
        self.room_freed()

    def kill(self) -> list[Job]:
        """The node is gone. Returns the jobs that it had."""
        self._dead = True
        self._processors.end(self)
        self.steps.add(self._loop.now, math.inf)
        return [*self._running, *self._waiting]

    def load(self) -> WorkerLoad:
        """As a live worker reports it: queued work by what its placement said, running work by the worker's own profile."""
        queued = sum(job.prompt_tokens - job.placement.reuse.reused_tokens for job in self._waiting)
        running = self._running[0] if self._running else None
        left_s = 0.0 if running is None else self._limits.profile.prefill_s(running.prompt_tokens, running.done_tokens)
        return WorkerLoad(len(self._waiting), queued, left_s, free_blocks=self.cache.free_blocks)

    def ahead_s(self) -> float:
        """True seconds of everything that is here, each prompt alone and in one step, with the reuse its placement said."""
        return self._waiting_s + sum(self._left_s(job.done_tokens, job.prompt_tokens) for job in self._running)

    def _left_s(self, done_tokens: int, prompt_tokens: int) -> float:
        left = prompt_tokens - done_tokens
        return self._truth.prefill.step_s([(done_tokens, left)]) / self._truth.stages.count if left > 0 else 0.0

    def _leave_line(self, job: Job) -> None:
        self._waiting.remove(job)
        self._waiting_s = self._waiting_s - job.ahead_s if self._waiting else 0.0

    def _wake(self) -> None:
        if self._stepping or self._begin_planned or self._dead or not (self._running or self._waiting):
            return
        self._begin_planned = True
        if self._hooks.gate is None:
            self._loop.at(self._loop.now, At.STEP_BEGIN, self._begin, 0, 0.0)
        else:
            self._hooks.gate(self._begin)

    def _begin(self, decoding: int, decode_s: float) -> float:
        """Begin a step beside `decoding` sequences that lengthen it by `decode_s`. Returns its duration, 0 if there is none."""
        self._begin_planned = False
        step = [] if self._dead else self._plan_step(max(1, self._limits.step_tokens - decoding))
        if not step:
            return 0.0
        self._stepping = True
        chunks = [(job.begun_tokens - tokens, tokens) for job, tokens, _ in step]
        duration_s = (self._truth.prefill.step_s(chunks) + decode_s) * self._processors.begin(self)
        if self._limits.step_variation:
            duration_s *= max(0.5, self._chance.gauss(1.0, self._limits.step_variation))
        self._pass(step, duration_s)
        return duration_s

    def _pass(self, step: list[Slice], duration_s: float) -> None:
        """Let a step that takes a single node `duration_s` through the stages of this worker."""
        now, stages = self._loop.now, self._truth.stages
        free_s, end_s = stages.free_s(now, duration_s), stages.end_s(now, duration_s, self._previous_end_s)
        since_s, self._previous_end_s = max(now, self._previous_end_s), end_s
        self.busy_s += free_s - now
        self.steps.add(now, free_s)
        if free_s < end_s:
            self._loop.at(free_s, At.COMPLETION, self._free)
        self._loop.at(end_s, At.COMPLETION, self._end, step, end_s - since_s, free_s == end_s)

    def _free(self) -> None:
        """The first stage can take the next step, while others are under way."""
        if not self._dead:
            self._pause()
            self._wake()

    def _pause(self) -> None:
        self._stepping = False
        self._processors.end(self)

    def _plan_step(self, left: int) -> list[Slice]:
        step: list[Slice] = []
        evicted: list[int] = []
        for job in self._running:
            left -= self._take(job, left, step, evicted)
        was_blocked, self._blocked = self._blocked, False
        while left > 0 and self._waiting and len(self._running) < self._limits.max_batch:
            job = self._waiting[0]
            self._blocked = not self._admit(job, evicted)
            if self._blocked:
                break
            if self._running and self._running[-1] is job:
                left -= self._take(job, left, step, evicted)
        if evicted:
            self._reporter.removed(Tier.DEVICE, evicted)
        if was_blocked and not self._blocked:
            self._hooks.freed()
        return step

    def _take(self, job: Job, left: int, step: list[Slice], evicted: list[int]) -> int:
        """Give the job its part of a step that has `left` tokens, and room for the blocks that it fills."""
        tokens = job.prompt_tokens - job.begun_tokens
        if self._limits.chunked:
            tokens = min(left, tokens)
        if tokens <= 0 or left <= 0 or job.cancelled:
            return 0
        added: list[int] = []
        filled = min((job.begun_tokens + tokens) // self._limits.block_tokens, len(job.request.block_hashes))
        if self._limits.reuse_blocks and filled > job.pinned:
            added, removed = self.cache.store(job.request.block_hashes[job.pinned : filled])
            evicted += removed
            job.reserved_blocks -= filled - job.pinned
            self.cache.promised_blocks -= filled - job.pinned
            job.pinned = filled
        job.begun_tokens += tokens
        step.append(Slice(job, tokens, added))
        return tokens

    def _admit(self, job: Job, evicted: list[int]) -> bool:
        """Move the first waiting job to the running ones. False when the pool has no room for it yet."""
        held_tokens = job.prompt_tokens + (job.output_tokens if self._limits.hold_output else 0)
        whole_blocks = -(-held_tokens // self._limits.block_tokens)
        if whole_blocks > self.cache.capacity_blocks:
            self._leave_line(job)
            pool = f"the pool of {self._reporter.source} has {self.cache.capacity_blocks}"
            self._hooks.refused(job, f"request of {whole_blocks} blocks; {pool}")
            return True
        if whole_blocks > self.cache.free_blocks + job.pinned and not self._others_yield(job, whole_blocks):
            return False
        self._leave_line(job)
        self._running.append(job)
        self._admitted.add(job.order)
        self._reuse(job)
        evicted += self._reserve(job, whole_blocks)
        self._reporter.emit(PrefillStarted(job.request.id, job.request.attempt, self._reporter.source))
        if job.record.prefill_start_s is None:
            job.record.prefill_start_s = self._loop.now
        self._hooks.started(job)
        return True

    def _others_yield(self, job: Job, whole_blocks: int) -> bool:
        """Let go of what was fetched for prompts behind `job`, if no room will become free otherwise. True if that suffices."""
        others = [] if self._admitted else self._waiting[:0:-1]
        for other in others:
            self.cache.unpin(other.request.block_hashes[: other.pinned])
            other.pinned = 0
            if whole_blocks <= self.cache.free_blocks + job.pinned:
                return True
        return False

    def _reuse(self, job: Job) -> None:
        blocks = job.request.block_hashes
        matched = 0
        if self._limits.reuse_blocks:
            matched = self.cache.match(blocks[: (job.prompt_tokens - 1) // self._limits.block_tokens])
            self.cache.pin(blocks[:matched])
            self.cache.unpin(blocks[: job.pinned])
        job.pinned = matched
        job.reused_tokens = job.done_tokens = job.begun_tokens = matched * self._limits.block_tokens

    def _reserve(self, job: Job, whole_blocks: int) -> list[int]:
        """Set room aside for the rest of the prompt: named blocks one by one as they fill, the others at once."""
        named = len(job.request.block_hashes) if self._limits.reuse_blocks else 0
        job.private_blocks = whole_blocks - named
        job.reserved_blocks = named - job.pinned
        self.cache.promised_blocks += job.reserved_blocks
        return self.cache.take_anonymous(job.private_blocks)

    def _end(self, step: list[Slice], took_s: float, frees: bool) -> None:
        """The step is through, `took_s` after it began or the one before it ended."""
        if self._dead:
            return
        if frees:
            self._pause()
        self._share_out(step, took_s)
        for job, tokens, added in step:
            before = job.done_tokens // self._limits.block_tokens
            job.done_tokens += tokens
            job.record.computed_tokens += tokens
            if added:
                self._report_stored(job, added, before)
            if job.cancelled and job.done_tokens == job.begun_tokens:
                self._running.remove(job)
                self.release(job)
            elif not job.cancelled and job.done_tokens == job.prompt_tokens:
                self._running.remove(job)
                self._complete(job)
        self._wake()

    def _share_out(self, step: list[Slice], took_s: float) -> None:
        """What each prompt would have taken alone: as the profile says, by as much as it is wrong of the whole step."""
        if len(step) == 1:
            step[0].job.compute_s += took_s
            return
        profile = self._limits.profile
        alone_s = [profile.prefill_s(job.done_tokens + tokens, job.done_tokens) for job, tokens, _ in step]
        together_s = sum(alone_s) - (len(step) - 1) * profile.prefill_base_s
        for part, part_s in zip(step, alone_s, strict=True):
            part.job.compute_s += part_s * took_s / together_s

    def _report_stored(self, job: Job, added: list[int], before: int) -> None:
        first = job.request.block_hashes.index(added[0], before)
        parent = job.request.block_hashes[first - 1] if first else None
        self._reporter.stored(Tier.DEVICE, parent, added)

    def _complete(self, job: Job) -> None:
        job.record.reused_tokens = job.reused_tokens
        self._reporter.emit(
            PrefillFinished(job.request.id, job.request.attempt, self._reporter.source, job.reused_tokens, job.compute_s)
        )
        self._hooks.finished(job)


def _order(job: Job) -> int:
    return job.order
