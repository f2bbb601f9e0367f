"""What finished work teaches: speed of prefill and decode, output lengths, and whether a worker's claims hold.

One home for everything that is learned, so that whoever knows that something ended has one thing to tell.
"""

from __future__ import annotations

from conductor.core.calibration import Calibration, DecodeCalibration
from conductor.core.cluster_view import ClusterView
from conductor.core.config import CalibrationConfig
from conductor.core.events import PrefillFinished, RequestFinished
from conductor.core.output_length import OutputLengths
from conductor.core.requests import RequestState
from conductor.core.trust import Trust
from conductor.core.types import WorkerId


class Learning:
    def __init__(self, config: CalibrationConfig, view: ClusterView) -> None:
        self.trust = Trust()
        self.outputs = OutputLengths()
        self._view = view
        self._prefill = Calibration(config)
        self._decode = DecodeCalibration(config)

    def joined(self, worker: WorkerId) -> None:
        if worker in self._view.prefill:
            self._prefill.joined(worker, self._view.prefill)

    def left(self, worker: WorkerId) -> None:
        self._prefill.left(worker)
        self._decode.left(worker)
        self.trust.forget(worker)

    def prefilled(self, state: RequestState, event: PrefillFinished, now: float) -> bool:
        """Learn from a prompt that has been computed. True if the worker's claims about its cache proved wrong."""
        pool, worker = self._view.prefill, event.worker_id
        if not event.warmup:
            base_s = pool.specs[worker].profile.prefill_s(state.request.prompt_tokens, event.reused_tokens)
            self._prefill.observe(worker, base_s, event.compute_s, pool, now)
        return self.trust.observe(worker, state.claimed_tokens, event.reused_tokens, pool)

    def finished(self, state: RequestState, event: RequestFinished, now: float) -> None:
        """Learn from a request that came to its natural end."""
        if not event.reason.is_natural:
            return
        self.outputs.observe(state.request.traffic_class, event.output_tokens)
        pool, worker = self._view.decode, state.decode
        if worker is not None and state.decoding_since_s is not None:
            step_s = (state.decode_step_s + pool.step_s(worker)) / 2
            steps = event.output_tokens - state.request.emitted_tokens - 1
            self._decode.observe(worker, step_s, steps, now - state.decoding_since_s, pool, now)
