"""A simulated decode engine: continuous batching whose steps are skipped analytically.

Between two changes of the batch the duration of every step is known in closed form, so time jumps from one change to the
next. Sequences join and leave at the boundary between two steps only. A hand-over first reserves room for prompt and output
(in order of arrival, at a boundary); its bytes flow then; the sequence joins at the next boundary after they have arrived.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from traces.outcomes import LONGEST_GAPS_SHARE
from traces.service_time import DecodeRun, DecodeTime
from traces.sim.job import Job
from traces.sim.loop import At, EventLoop
from traces.sim.processors import Processors


class Pace(NamedTuple):
    """Steps of one unchanging batch, as a request's gaps between tokens see them: each longer than the last by `drift_s`."""

    steps: int
    seconds: float
    drift_s: float = 0.0

    @property
    def mean_s(self) -> float:
        return self.seconds / self.steps

    @property
    def first_s(self) -> float:
        return self.mean_s - self.drift_s * (self.steps - 1) / 2

    def last_s(self, steps: int) -> float:
        """Seconds of the last `steps` steps together."""
        return steps * (self.mean_s + self.drift_s * (self.steps - steps) / 2)

    def without_first(self) -> Pace:
        return Pace(self.steps - 1, self.seconds - self.first_s, self.drift_s)


class DecodeHooks(NamedTuple):
    """Called by the engine: room is reserved, the first token is out, the last token is out, it can never fit."""

    reserved: Callable[[Job], None]
    first_token: Callable[[Job], None]
    finished: Callable[[Job], None]
    refused: Callable[[Job, str], None]


class DecodeEngine:
    """Decode side of one worker with room for `capacity_tokens` of KV and `max_batch` sequences."""

    def __init__(
        self,
        loop: EventLoop,
        time: DecodeTime,
        hooks: DecodeHooks,
        *,
        capacity_tokens: int,
        max_batch: int,
        processors: Processors | None = None,
    ) -> None:
        self.capacity_tokens = capacity_tokens
        self.reserved_tokens = 0
        self.batch = 0
        self.context_tokens = 0
        self._loop = loop
        self._time = time
        self._hooks = hooks
        self._max_batch = max_batch
        self._processors = processors or Processors()
        self._processors.follow(self._plan_begin)
        self._stretch = 1.0
        self._admitted = 0
        self._reserving: deque[Job] = deque()
        self._expected: dict[int, Job] = {}
        self._joining: list[Job] = []
        self._leaving: list[Job] = []
        self._active: list[tuple[int, int, Job]] = []
        self._run: DecodeRun = time.run(0, 0)
        self._step = 0
        self._step_start_s = 0.0
        self._begun_s = -1.0
        self._version = 0
        self._begin_version = -1
        self._paces: list[Pace] = []
        self._dropped_paces = 0
        self._dead = False

    def offer(self, job: Job) -> None:
        """Ask for room; `hooks.reserved` answers at a step boundary."""
        if self._need(job) > self.capacity_tokens:
            self._hooks.refused(job, f"{self._need(job)} tokens of KV; the worker holds {self.capacity_tokens}")
            return
        self._reserving.append(job)
        self._plan_begin()

    def join(self, job: Job) -> None:
        """The job's KV is here: decode from the next boundary on."""
        del self._expected[job.order]
        self._joining.append(job)
        self._plan_begin()

    def expects(self, job: Job) -> bool:
        """Room is reserved for the job and its KV is awaited."""
        return job.order in self._expected

    def cancel(self, job: Job) -> None:
        """Leave at the next boundary; what has not joined leaves at once."""
        job.cancelled = True
        if job in self._reserving:
            self._reserving.remove(job)
        elif job in self._joining:
            self._joining.remove(job)
            self._free(job)
        elif self._expected.pop(job.order, None) is not None:
            self._free(job)
        elif any(job is active for _, _, active in self._active):
            self._leaving.append(job)
        self._plan_begin()

    def kill(self) -> list[Job]:
        """The node is gone. Brings the tokens of its jobs up to date and returns the jobs."""
        if self.batch:
            steps = self._run.steps_until(self._loop.now - self._step_start_s)
            late = self._step_start_s + self._run.elapsed_s(steps) > self._loop.now
            self._advance(steps - 1 if late and steps else steps)
        self._dead = True
        self._processors.end(self)
        self._version += 1
        active = [job for _, _, job in self._active]
        for job in active:
            from_prefill = job.join_wait_s is not None
            job.record.emitted_tokens = job.request.emitted_tokens + self._step - job.first_step + from_prefill
        return [*active, *self._joining, *self._expected.values(), *self._reserving]

    @staticmethod
    def _need(job: Job) -> int:
        return job.prompt_tokens + job.output_tokens

    def _free(self, job: Job) -> None:
        self.reserved_tokens -= self._need(job)
        self._admitted -= 1

    def _plan_begin(self) -> None:
        """Plan the next boundary at which sequences may join."""
        if self._dead or self._begin_version == self._version or not self._wants_boundary():
            return
        steps = 0
        if self.batch:
            steps = self._run.steps_until(self._loop.now - self._step_start_s)
            if steps == 0 and self._begun_s == self._loop.now:
                steps = 1
        else:
            self._step_start_s = self._loop.now
        self._begin_version = self._version
        boundary_s = self._step_start_s + self._run.elapsed_s(steps)
        self._loop.at(max(boundary_s, self._loop.now), At.STEP_BEGIN, self._begin, self._version, steps)

    def _lend_out(self) -> bool:
        """Whether somebody else takes the accelerator at this boundary."""
        return False

    def _wants_boundary(self) -> bool:
        paced_anew = self.batch and self._stretch != self._processors.stretch
        return bool(self._joining or self._leaving or paced_anew) or self._can_reserve()

    def _can_reserve(self) -> bool:
        if not self._reserving or self._admitted >= self._max_batch:
            return False
        return self.reserved_tokens + self._need(self._reserving[0]) <= self.capacity_tokens

    def _begin(self, version: int, steps: int) -> None:
        if version != self._version:
            return
        self._advance(steps)
        self._begun_s = self._loop.now
        for job in self._leaving:
            self._drop(job)
        self._leaving.clear()
        joined, self._joining = self._joining, []
        for job in joined:
            self._add(job)
        self._restart(runs=not self._lend_out())
        for job in joined:
            if job.join_wait_s is None:
                self._loop.at(self._loop.now + self._run.first_s, At.COMPLETION, self._first_token, job)
        while self._can_reserve():
            job = self._reserving.popleft()
            self.reserved_tokens += self._need(job)
            self._admitted += 1
            self._expected[job.order] = job
            self._hooks.reserved(job)
        self._plan_begin()

    def _add(self, job: Job) -> None:
        job.context_tokens = job.prompt_tokens
        job.first_step = self._step
        job.last_step = self._step + job.output_tokens
        if job.first_token_s is not None:
            job.join_wait_s = self._loop.now - job.first_token_s
            job.last_step -= 1
        job.joined_run = self._dropped_paces + len(self._paces)
        self.batch += 1
        self.context_tokens += job.context_tokens
        heapq.heappush(self._active, (job.last_step, job.order, job))

    def _drop(self, job: Job) -> None:
        self._active = [entry for entry in self._active if entry[2] is not job]
        heapq.heapify(self._active)
        self._remove(job)

    def _remove(self, job: Job) -> None:
        self.batch -= 1
        self.context_tokens -= job.context_tokens + self._step - job.first_step
        self._free(job)

    def _first_token(self, job: Job) -> None:
        if not (job.cancelled or self._dead):
            self._hooks.first_token(job)

    def _advance(self, steps: int) -> None:
        """Let `steps` steps of the current batch pass."""
        if steps and self.batch:
            elapsed_s = self._run.elapsed_s(steps)
            self._paces.append(Pace(steps, elapsed_s, self._run.linear_s + self._run.quadratic_s * steps))
            self._step += steps
            self._step_start_s += elapsed_s
            self.context_tokens += steps * self.batch

    def _restart(self, *, runs: bool = True) -> None:
        """A batch has changed: its steps take other times, and another sequence may be the first to end."""
        self._version += 1
        self._run = self._time.run(self.batch, self.context_tokens)
        if not (self._active and runs):
            self._processors.end(self)
            return
        self._stretch = self._processors.begin(self)
        self._run = self._run.stretched(self._stretch)
        steps = self._active[0][0] - self._step
        end_s = max(self._loop.now, self._step_start_s + self._run.elapsed_s(steps))
        self._loop.at(end_s, At.COMPLETION, self._finish_due, self._version, steps)

    def _finish_due(self, version: int, steps: int) -> None:
        if version != self._version:
            return
        self._advance(steps)
        self._end_due()

    def _end_due(self) -> None:
        """Sequences whose last token the latest step made leave the batch."""
        done = []
        while self._active and self._active[0][0] == self._step:
            job = heapq.heappop(self._active)[2]
            self._remove(job)
            done.append(job)
        self._restart()
        for job in done:
            job.record.tbt_s = self._longest_gaps_s(job)
            self._hooks.finished(job)
        self._forget_paces()
        self._plan_begin()

    def _longest_gaps_s(self, job: Job) -> float | None:
        """Mean of the longest tenth of the gaps between the job's tokens (FAST'25, section 5.1)."""
        gaps = self._gaps(job)
        count = sum(gap.steps for gap in gaps)
        if count == 0:
            return None
        left = longest = max(1, math.ceil(count * LONGEST_GAPS_SHARE))
        total_s = 0.0
        for gap in sorted(gaps, key=_mean_s, reverse=True):
            steps = min(left, gap.steps)
            total_s += gap.last_s(steps)
            left -= steps
            if left == 0:
                break
        return total_s / longest

    def _gaps(self, job: Job) -> list[Pace]:
        """The job's steps; the first one makes the first token, unless prefill made that: then the hand-over lengthens it."""
        paces = self._paces[job.joined_run - self._dropped_paces :]
        if not paces:
            return []
        first_s = paces[0].first_s
        paces[0] = paces[0].without_first()
        if job.join_wait_s is not None:
            paces.append(Pace(1, first_s + job.join_wait_s))
        return [pace for pace in paces if pace.steps]

    def _forget_paces(self) -> None:
        if len(self._paces) < 4096:
            return
        keep_from = min((job.joined_run for _, _, job in self._active), default=self._dropped_paces + len(self._paces))
        del self._paces[: keep_from - self._dropped_paces]
        self._dropped_paces = keep_from


def _mean_s(pace: Pace) -> float:
    return pace.seconds / pace.steps
