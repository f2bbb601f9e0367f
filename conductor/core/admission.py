"""The place where a request is rejected: no other module builds a `Rejection`.

From a policy's choice and the request's objectives to a `Placement` or a `Rejection`. It knows only predictions, so it
fails open: an estimate that recent observations do not support rejects nothing. (Mooncake arXiv v3, section 7.)
"""

from __future__ import annotations

from conductor.core.config import SchedulerConfig
from conductor.core.placement import Choice, Situation
from conductor.core.types import (
    SLO,
    Decision,
    Placement,
    Rejection,
    RejectReason,
    Request,
    TTFTEstimate,
)

MIN_RETRY_S = 0.1
MAX_RETRY_S = 60.0


def admit(situation: Situation, choice: Choice) -> Decision:
    """Hold a choice against the request's objectives."""
    config, request = situation.config, situation.request
    estimate = choice.candidates.estimate(choice.row, situation.waited_s)
    slo = objectives(request, config)
    if config.admission != "none" and request.attempt == 1:
        refused = _ttft_refusal(situation, choice, estimate, slo) or _tbt_refusal(situation, choice, slo)
        if refused is not None:
            return refused
    leaves_decode_open = config.admission == "on_prefill_done"
    return Placement(
        request_id=request.id,
        attempt=request.attempt,
        prefill=choice.prefill,
        decode=None if leaves_decode_open else choice.decode.worker,
        reuse=choice.candidates.reuse(choice.row),
        ttft=estimate,
        tbt_s=None if leaves_decode_open else choice.decode.tbt_s,
    )


def objectives(request: Request, config: SchedulerConfig) -> SLO:
    return SLO(
        ttft_s=config.slo.ttft_s if request.slo.ttft_s is None else request.slo.ttft_s,
        tbt_s=config.slo.tbt_s if request.slo.tbt_s is None else request.slo.tbt_s,
    )


def refuse(request: Request, reason: RejectReason, message: str, retry_after_s: float) -> Rejection:
    """A rejection for a reason that is no prediction."""
    return Rejection(request.id, reason, message, retry_after_s)


def _ttft_refusal(situation: Situation, choice: Choice, estimate: TTFTEstimate, slo: SLO) -> Rejection | None:
    """Refuse when even the optimistic end of the estimate misses the objective on every worker."""
    if slo.ttft_s is None or not choice.candidates.calibrated.all():
        return None
    predicted_s = estimate.low_s * situation.config.rejection_bias[situation.request.priority]
    if predicted_s <= slo.ttft_s:
        return None
    shortfall_s = estimate.total_s - slo.ttft_s
    return Rejection(
        request_id=situation.request.id,
        reason=RejectReason.TTFT_SLO,
        message=f"predicted time to first token {estimate.total_s:.3f} s exceeds the objective of {slo.ttft_s:.3f} s",
        retry_after_s=min(max(shortfall_s, MIN_RETRY_S), MAX_RETRY_S),
        best_worker=choice.prefill,
        predicted_s=estimate.total_s,
        predicted_low_s=estimate.low_s,
        predicted_high_s=estimate.high_s,
        objective_s=slo.ttft_s,
        shortfall_s=shortfall_s,
    )


def _tbt_refusal(situation: Situation, choice: Choice, slo: SLO) -> Rejection | None:
    decode = choice.decode
    if situation.config.admission == "on_prefill_done" or slo.tbt_s is None or not decode.calibrated:
        return None
    if decode.tbt_s * situation.config.rejection_bias[situation.request.priority] <= slo.tbt_s:
        return None
    return Rejection(
        request_id=situation.request.id,
        reason=RejectReason.TBT_SLO,
        message=f"predicted time between tokens {decode.tbt_s:.4f} s exceeds the objective of {slo.tbt_s:.4f} s",
        retry_after_s=1.0,
        best_worker=decode.worker,
        predicted_s=decode.tbt_s,
        objective_s=slo.tbt_s,
        shortfall_s=decode.tbt_s - slo.tbt_s,
    )
