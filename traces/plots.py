"""Pictures of a run as inline SVG: distributions, time lines, estimate against truth.

Drawn with matplotlib without a display, straight from outcomes; nothing is decided here. Text stays text, so that a reader
can search and copy it. The bytes depend on the run alone.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from traces.outcomes import LoadSample, OutcomeStatus, RequestOutcome, RunResult

BINS = 120
Plot = tuple[str, str]


def plots(run: RunResult) -> list[Plot]:
    """Title and SVG of every plot that the run has data for."""
    measured = [outcome for outcome in run.outcomes if not outcome.warmup]
    completed = [outcome for outcome in measured if outcome.status is OutcomeStatus.COMPLETED]
    drawn = [
        ("Time to first token", _cdf([o.ttft_s for o in completed], run.slo.ttft_s, "TTFT, s")),
        ("Time between tokens (longest tenth)", _cdf([o.tbt_s for o in completed], run.slo.tbt_s, "TBT, s")),
        ("Requests over time", _flow(measured)),
        ("Token hit ratio over time", _hits(completed)),
        ("Load of both pools", _loads(run.loads)),
        ("Estimate against truth", _estimates(completed)),
    ]
    return [(title, svg) for title, svg in drawn if svg is not None]


def _svg(draw: Callable[[Axes], None]) -> str:
    style: dict[Any, Any] = {  # matplotlib types its own keys as literals
        "svg.fonttype": "none",
        "svg.hashsalt": "conductor",
        "font.size": 9,
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(7.2, 3.2), layout="constrained")
        draw(figure.subplots())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _cdf(values: Sequence[float | None], objective: float | None, label: str) -> str | None:
    observed = np.sort(np.array([value for value in values if value is not None]))
    if observed.size == 0:
        return None

    def draw(axes: Axes) -> None:
        axes.step(observed, np.arange(1, observed.size + 1) / observed.size, where="post")
        if objective is not None:
            axes.axvline(objective, linestyle="--", color="tab:red", label=f"objective {objective:g} s")
            axes.legend()
        axes.set(xlabel=label, ylabel="share of completed requests", ylim=(0, 1.02))
        if observed[0] > 0:
            axes.set_xscale("log")

    return _svg(draw)


def _flow(measured: Sequence[RequestOutcome]) -> str | None:
    """Requests that wait for their first token, that decode, and rejections, over time."""
    sent = [outcome for outcome in measured if outcome.sent_s is not None]
    if not sent:
        return None
    starts = np.sort([outcome.due_s for outcome in sent])
    edges = np.linspace(0.0, max(_end_s(outcome) for outcome in sent) or 1.0, BINS + 1)
    firsts = np.sort([_end_s(o) if o.ttft_s is None else (o.sent_s or 0.0) + o.ttft_s for o in sent])
    ends = np.sort([_end_s(outcome) for outcome in sent])
    begun, first, ended = (np.searchsorted(times, edges, side="right") for times in (starts, firsts, ends))
    rejected = [_end_s(outcome) for outcome in sent if outcome.status is OutcomeStatus.REJECTED]

    def draw(axes: Axes) -> None:
        axes.plot(edges, begun - first, label="waiting for the first token")
        axes.plot(edges, first - ended, label="decoding")
        axes.step(edges[:-1], np.histogram(rejected, edges)[0], where="post", label="rejected in this interval")
        axes.set(xlabel="time, s", ylabel="requests")
        axes.legend()

    return _svg(draw)


def _hits(completed: Sequence[RequestOutcome]) -> str | None:
    known = [outcome for outcome in completed if outcome.reused_tokens is not None]
    if not known:
        return None
    times = np.array([outcome.due_s for outcome in known])
    edges = np.linspace(0.0, float(times.max()) or 1.0, BINS + 1)
    reused = np.histogram(times, edges, weights=[o.reused_tokens or 0 for o in known])[0]
    prompted = np.histogram(times, edges, weights=[o.input_tokens for o in known])[0]
    filled = prompted > 0

    def draw(axes: Axes) -> None:
        axes.plot(edges[:-1][filled], reused[filled] / prompted[filled], marker=".", linestyle="-", linewidth=0.8)
        axes.set(xlabel="time, s", ylabel="reused / prompt tokens", ylim=(-0.02, 1.02))

    return _svg(draw)


def _loads(loads: Sequence[LoadSample]) -> str | None:
    if not loads:
        return None

    def draw(axes: Axes) -> None:
        times = [sample.time_s for sample in loads]
        axes.plot(times, [sample.prefill_load for sample in loads], label="prefill")
        axes.plot(times, [sample.decode_load for sample in loads], label="decode")
        axes.axhline(1.0, linestyle="--", color="tab:red", linewidth=0.8)
        axes.set(xlabel="time, s", ylabel="load (1: at the objective)")
        axes.legend()

    return _svg(draw)


def _estimates(completed: Sequence[RequestOutcome]) -> str | None:
    pairs = [(o.ttft_s, o.predicted_ttft_s) for o in completed if o.ttft_s and o.predicted_ttft_s]
    if not pairs:
        return None
    observed, predicted = np.array(pairs, dtype=float).T

    def draw(axes: Axes) -> None:
        low, high = min(observed.min(), predicted.min()), max(observed.max(), predicted.max())
        axes.plot((low, high), (low, high), linestyle="--", color="tab:red", linewidth=0.8)
        axes.scatter(observed, predicted, s=6, alpha=0.5, rasterized=len(pairs) > 2_000)
        axes.set(xscale="log", yscale="log", xlabel="observed TTFT, s", ylabel="predicted TTFT, s")

    return _svg(draw)


def _end_s(outcome: RequestOutcome) -> float:
    return (outcome.sent_s or 0.0) + (outcome.e2e_s or 0.0)
