"""The decode side of an engine that also prefills: both share one accelerator, as an undisaggregated server runs.

Prefill asks for the accelerator and gets it at the next boundary between two decode steps, before any further decode step.
With chunked prefill the sequences that decode make one token in the same, longer step; without it they stand still until
the whole prompt is computed. Between prefill steps decode runs on, skipped analytically.
"""

from __future__ import annotations

from typing import Any

from traces.sim.decode import DecodeEngine, Pace
from traces.sim.job import Job
from traces.sim.loop import At
from traces.sim.prefill import StepStart


class CoupledDecode(DecodeEngine):
    """Decode engine that lends its accelerator to a prefill engine."""

    def __init__(self, *args: Any, mixed_steps: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mixed_steps = mixed_steps
        self._borrower: StepStart | None = None
        self._lent = False
        self._stalled_s = 0.0

    def lend(self, begin: StepStart) -> None:
        """Call `begin` at the next boundary between two steps."""
        self._borrower = begin
        self._plan_begin()

    def _wants_boundary(self) -> bool:
        return not self._lent and (self._borrower is not None or super()._wants_boundary())

    def enter(self, job: Job) -> None:
        """A prompt computed on this very engine decodes from the next boundary on; the shared pool has room for it."""
        self.reserved_tokens += self._need(job)
        self._admitted += 1
        self._joining.append(job)
        self._plan_begin()

    def _lend_out(self) -> bool:
        begin, self._borrower = self._borrower, None
        if begin is None:
            return False
        beside_s = self._time.step_s(self.batch, self.context_tokens) - self._time.step_s(0, 0)
        duration_s = begin(self.batch, beside_s) if self._mixed_steps else begin(0, 0.0)
        self._lent = duration_s > 0.0
        if self._lent:
            self._loop.at(self._loop.now + duration_s, At.COMPLETION, self._take_back, duration_s)
        return self._lent

    def _take_back(self, duration_s: float) -> None:
        """The prefill step is over; so is a decode step if both went together."""
        if self._dead:
            return
        self._lent = False
        self._step_start_s = self._loop.now
        if self._mixed_steps and self.batch:
            self._paces.append(Pace(1, duration_s))
            self._step += 1
            self.context_tokens += self.batch
        else:
            self._stalled_s += duration_s
        self._end_due()

    def _advance(self, steps: int) -> None:
        """The first step after a stall includes it, as the sequences see it."""
        known = len(self._paces)
        super()._advance(steps)
        if len(self._paces) > known and self._stalled_s:
            pace = self._paces.pop()
            self._paces.append(Pace(1, pace.first_s + self._stalled_s))
            if pace.steps > 1:
                self._paces.append(pace.without_first())
            self._stalled_s = 0.0
