"""The place where a request is rejected: no other module builds a `Rejection`.

From a policy's choice and the request's objectives to a `Placement` or a `Rejection`, by one of four rules:

    none             nothing is refused for what is predicted
    on_prefill_done  prefill load and TTFT on arrival; decode load only once the prompt is computed, whose work is then wasted
    early            also the decode load and TBT of the moment of arrival
    predictive       the decode load of the moment at which the prefill will be done (Mooncake arXiv v3, section 7)

Each holds pool loads against `load_threshold` and the request's own prediction against its objectives. It knows only
predictions, so it fails open: what recent observations do not support rejects nothing (I12). Predictions are scaled by
priority class before they are compared, since refusing a request of high priority in error costs more than serving it late.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conductor.core.config import SchedulerConfig
from conductor.core.decode_timeline import DecodeTimeline
from conductor.core.load import decode_load, decode_load_ahead, prefill_load
from conductor.core.placement import Choice, Situation
from conductor.core.tbt import DecodeChoice
from conductor.core.types import (
    SLO,
    Decision,
    Placement,
    Rejection,
    RejectReason,
    Request,
    TTFTEstimate,
    WorkerId,
)

MIN_RETRY_S = 0.1
MAX_RETRY_S = 60.0


def admit(situation: Situation, choice: Choice, timeline: DecodeTimeline) -> Decision:
    """Hold a choice against the request's objectives and the load of both pools."""
    config, request = situation.config, situation.request
    estimate = choice.candidates.estimate(choice.row, situation.waited_s)
    refused = _too_long(situation) or _refusal(situation, choice, estimate, timeline)
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


def admit_to_decode(
    request: Request, decode: DecodeChoice, config: SchedulerConfig, timeline: DecodeTimeline, now: float
) -> Rejection | None:
    """The check that `on_prefill_done` leaves for the end of the prefill."""
    objective_s = objectives(request, config).tbt_s
    if request.attempt > 1 or objective_s is None or not decode.calibrated:
        return None
    return _tbt_refusal(request, decode, objective_s, config, timeline, now)


def objectives(request: Request, config: SchedulerConfig) -> SLO:
    if config.slo.ttft_s is None and config.slo.tbt_s is None:
        return request.slo
    return SLO(
        ttft_s=config.slo.ttft_s if request.slo.ttft_s is None else request.slo.ttft_s,
        tbt_s=config.slo.tbt_s if request.slo.tbt_s is None else request.slo.tbt_s,
    )


def may_refuse(request: Request, config: SchedulerConfig) -> bool:
    """Whether any prediction could lead to a refusal at all."""
    slo = objectives(request, config)
    return config.admission != "none" and (slo.ttft_s is not None or slo.tbt_s is not None)


def refuse(request: Request, reason: RejectReason, message: str, retry_after_s: float) -> Rejection:
    """A rejection for a reason that is no prediction."""
    return Rejection(request.id, reason, message, _bounded(retry_after_s))


def _refusal(situation: Situation, choice: Choice, estimate: TTFTEstimate, timeline: DecodeTimeline) -> Rejection | None:
    config, request = situation.config, situation.request
    if config.admission == "none" or request.attempt > 1:
        return None
    slo, refused = objectives(request, config), None
    if slo.ttft_s is not None and choice.candidates.calibrated.all():
        refused = _ttft_refusal(situation, choice.prefill, estimate, slo.ttft_s)
    checks_decode = slo.tbt_s is not None and choice.decode.calibrated and config.admission != "on_prefill_done"
    if refused is None and slo.tbt_s is not None and checks_decode:
        refused = _decode_refusal(situation, choice, estimate, slo.tbt_s, timeline)
    return refused


def _too_long(situation: Situation) -> Rejection | None:
    """A prompt that no worker could ever hold."""
    config, request = situation.config, situation.request
    blocks = -(-request.prompt_tokens // config.block_tokens)
    view = situation.view
    if blocks <= min(view.prefill.least_capacity_blocks, view.decode.least_capacity_blocks):
        return None
    room = min(
        float(np.max(view.prefill.capacity_blocks[situation.prefill_eligible], initial=0.0)),
        float(np.max(view.decode.capacity_blocks[situation.decode_eligible], initial=0.0)),
    )
    if blocks <= room:
        return None
    message = f"the prompt takes {blocks} KV blocks; the largest worker of one pool has {room:.0f}"
    return Rejection(request.id, RejectReason.TOO_LONG, message, MAX_RETRY_S, predicted_s=None)


def _ttft_refusal(situation: Situation, worker: WorkerId, estimate: TTFTEstimate, objective_s: float) -> Rejection | None:
    """Refuse when even the optimistic end of the estimate misses the objective, or the whole pool is overloaded."""
    config, request = situation.config, situation.request
    bias = config.rejection_bias[request.priority]
    shortfall_s = estimate.total_s - objective_s
    if estimate.low_s * bias > objective_s:
        message = f"predicted time to first token {estimate.total_s:.3f} s exceeds the objective of {objective_s:.3f} s"
        predicted = _Prediction(worker, estimate.total_s, estimate.low_s, estimate.high_s, objective_s)
        return _predicted(request, RejectReason.TTFT_SLO, message, predicted, shortfall_s)
    load = prefill_load(situation, objective_s)
    if load * bias <= config.load_threshold:
        return None
    message = f"load {load:.2f} of the prefill pool exceeds {config.load_threshold:.2f}"
    waiting_s = load * objective_s
    predicted = _Prediction(worker, waiting_s, waiting_s, waiting_s, config.load_threshold * objective_s)
    return _predicted(request, RejectReason.OVERLOAD, message, predicted, waiting_s - predicted.objective_s)


def _decode_refusal(
    situation: Situation, choice: Choice, estimate: TTFTEstimate, objective_s: float, timeline: DecodeTimeline
) -> Rejection | None:
    """Refuse when the decode pool is, or will be, overloaded; under `early` also when the chosen worker is."""
    config, request, now = situation.config, situation.request, situation.now
    bias = config.rejection_bias[request.priority]
    if config.admission == "predictive":
        load = decode_load_ahead(situation, timeline, now + estimate.total_s - situation.waited_s, objective_s)
        when = "when its prefill is done"
    else:
        refused = _tbt_refusal(request, choice.decode, objective_s, config, timeline, now)
        if refused is not None:
            return refused
        load, when = decode_load(situation, objective_s), "on arrival"
    if load * bias <= config.load_threshold:
        return None
    message = f"load {load:.2f} of the decode pool {when} exceeds {config.load_threshold:.2f}"
    step_s, limit_s = load * objective_s, config.load_threshold * objective_s
    spread = choice.decode.high_s / choice.decode.tbt_s, choice.decode.low_s / choice.decode.tbt_s
    predicted = _Prediction(choice.decode.worker, step_s, step_s * spread[1], step_s * spread[0], limit_s)
    return _predicted(request, RejectReason.OVERLOAD, message, predicted, timeline.drain_s(now, 1.0 - 1.0 / load))


def _tbt_refusal(
    request: Request,
    decode: DecodeChoice,
    objective_s: float,
    config: SchedulerConfig,
    timeline: DecodeTimeline,
    now: float,
) -> Rejection | None:
    if decode.tbt_s * config.rejection_bias[request.priority] <= objective_s:
        return None
    message = f"predicted time between tokens {decode.tbt_s:.4f} s exceeds the objective of {objective_s:.4f} s"
    predicted = _Prediction(decode.worker, decode.tbt_s, decode.low_s, decode.high_s, objective_s)
    return _predicted(request, RejectReason.TBT_SLO, message, predicted, timeline.drain_s(now, 0.5))


@dataclass(frozen=True, slots=True)
class _Prediction:
    """What was predicted for the best worker, with its interval, and what it was held against."""

    worker: WorkerId
    value_s: float
    low_s: float
    high_s: float
    objective_s: float


def _predicted(request: Request, reason: RejectReason, message: str, prediction: _Prediction, drain_s: float) -> Rejection:
    """A rejection by prediction. `drain_s` is how long it is likely to take until the prediction would pass."""
    return Rejection(
        request_id=request.id,
        reason=reason,
        message=message,
        retry_after_s=_bounded(drain_s),
        best_worker=prediction.worker,
        predicted_s=prediction.value_s,
        predicted_low_s=prediction.low_s,
        predicted_high_s=prediction.high_s,
        objective_s=prediction.objective_s,
        shortfall_s=prediction.value_s - prediction.objective_s,
    )


def _bounded(retry_after_s: float) -> float:
    return min(max(retry_after_s, MIN_RETRY_S), MAX_RETRY_S)
