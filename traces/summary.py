"""From a run's outcomes to the figures of its report: the JSON that `report.schema.json` describes.

Warm-up requests stay out. Rejected, failed and unfinished requests stay in the denominator of the effective request
capacity (FAST'25, section 5.1), so that refusing work never looks like serving it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from traces.outcomes import OutcomeStatus, RequestOutcome, RunResult

SCHEMA_VERSION = 1
SECONDS_PER_HOUR = 3600
Distribution: TypeAlias = dict[str, float]


def summarise(run: RunResult) -> dict[str, object]:
    """Every figure of the report, as JSON values."""
    measured = [outcome for outcome in run.outcomes if not outcome.warmup]
    completed = [outcome for outcome in measured if outcome.status is OutcomeStatus.COMPLETED]
    return {
        "schema_version": SCHEMA_VERSION,
        "mode": run.mode.value,
        "trace": run.trace,
        "settings": dict(run.settings),
        "slo": {"ttft_s": run.slo.ttft_s, "tbt_s": run.slo.tbt_s},
        "interrupted": run.interrupted,
        "warmup_requests": len(run.outcomes) - len(measured),
        "requests": len(measured),
        "completed": len(completed),
        "rejected": _reasons(measured, OutcomeStatus.REJECTED),
        "failed": _reasons(measured, OutcomeStatus.FAILED),
        "unfinished": len(measured) - len(completed) - _ended_badly(measured),
        "ttft_s": distribution(outcome.ttft_s for outcome in completed),
        "tbt_s": distribution(outcome.tbt_s for outcome in completed),
        "tpot_s": distribution(outcome.tpot_s for outcome in completed),
        "e2e_s": distribution(outcome.e2e_s for outcome in completed),
        "client_lag_s": distribution(outcome.lag_s for outcome in measured),
        **_service(run, measured, completed),
        **_cache(measured, completed),
        "bytes_moved": dict(run.bytes_moved),
        "replicas": dict(run.replicas),
        "load_max_over_mean": run.load_max_over_mean,
        "estimate_error": estimate_error(completed),
        "wall_s": run.wall_s,
        "read_report": None if run.read_report is None else dict(run.read_report),
    }


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Mean and percentiles of the observed values; None when there are none."""
    observed = np.array([value for value in values if value is not None])
    if observed.size == 0:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(observed, (50, 90, 99)))
    return {"mean": float(observed.mean()), "p50": p50, "p90": p90, "p99": p99, "max": float(observed.max())}


def estimate_error(completed: Sequence[RequestOutcome]) -> dict[str, float | int] | None:
    """Predicted against observed TTFT, relative to the observed; None when nothing was predicted.

    Positive bias: the prediction was too long.
    """
    pairs = [(o.predicted_ttft_s, o.ttft_s) for o in completed if o.predicted_ttft_s is not None and o.ttft_s]
    if not pairs:
        return None
    predicted, observed = np.array(pairs, dtype=float).T
    relative = (predicted - observed) / observed
    return {
        "requests": len(pairs),
        "median_absolute": float(np.median(np.abs(relative))),
        "mean_absolute": float(np.abs(relative).mean()),
        "p90_absolute": float(np.percentile(np.abs(relative), 90)),
        "bias": float(relative.mean()),
        "mean_absolute_s": float(np.abs(predicted - observed).mean()),
    }


def _reasons(measured: Sequence[RequestOutcome], status: OutcomeStatus) -> dict[str, int]:
    counts = Counter(outcome.reason or "unknown" for outcome in measured if outcome.status is status)
    return dict(sorted(counts.items()))


def _ended_badly(measured: Sequence[RequestOutcome]) -> int:
    return sum(outcome.status in (OutcomeStatus.REJECTED, OutcomeStatus.FAILED) for outcome in measured)


def _service(
    run: RunResult, measured: Sequence[RequestOutcome], completed: Sequence[RequestOutcome]
) -> dict[str, float | None]:
    good = sum(outcome.meets(run.slo) for outcome in measured)
    output_tokens = sum(outcome.output_tokens for outcome in completed)
    gpu_hours = None if run.gpus is None else run.gpus * run.duration_s / SECONDS_PER_HOUR
    return {
        "effective_request_capacity": good / len(measured) if measured else None,
        "goodput_rps": good / run.duration_s if run.duration_s > 0 else None,
        "output_tokens_per_s": output_tokens / run.duration_s if run.duration_s > 0 else None,
        "completed_per_gpu_hour": len(completed) / gpu_hours if gpu_hours else None,
        "duration_s": run.duration_s,
    }


def _cache(measured: Sequence[RequestOutcome], completed: Sequence[RequestOutcome]) -> dict[str, float | int | None]:
    known = [(o.reused_tokens, o.input_tokens) for o in completed if o.reused_tokens is not None]
    avoided = sum(reused for reused, _ in known)
    prompted = sum(tokens for _, tokens in known)
    verdicts = [o.falsely_rejected for o in measured if o.status is OutcomeStatus.REJECTED]
    judged = [verdict for verdict in verdicts if verdict is not None]
    return {
        "token_hit_ratio": avoided / prompted if prompted else None,
        "prefill_tokens_avoided": avoided if known else None,
        "wasted_prefill_tokens": sum(o.wasted_prefill_tokens for o in measured),
        "false_rejections": sum(judged) if judged or not verdicts else None,
    }
