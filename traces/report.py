"""A run for its readers: a table for people, JSON for programs, one HTML file for both to keep.

The figures are `summary.summarise`'s; this module only lays them out. `-` as a file name means standard output, and then
nothing else is written there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from rich.table import Table

from traces.summary import Distribution

STANDARD_OUTPUT = "-"
DISTRIBUTIONS = (("TTFT", "ttft_s"), ("TBT", "tbt_s"), ("TPOT", "tpot_s"), ("end to end", "e2e_s"))
Summary = Mapping[str, object]


def latency_table(summary: Summary) -> Table:
    """Mean and percentiles of the four latencies, and of the client's own lag where there was a client."""
    table = Table(title=f"{summary['trace']}: latency in seconds", title_justify="left")
    table.add_column("")
    for heading in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right")
    for label, key in (*DISTRIBUTIONS, ("client lag", "client_lag_s")):
        row = cast(Distribution | None, summary[key])
        if row is not None:
            table.add_row(label, *(f"{row[heading]:.3f}" for heading in ("mean", "p50", "p90", "p99", "max")))
    return table


def figures_table(summary: Summary) -> Table:
    """Everything else, one figure a line; figures that were not observed are left out."""
    table = Table(title=f"{summary['trace']}: figures", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for label, text in figures(summary):
        table.add_row(label, text)
    return table


def figures(summary: Summary) -> Sequence[tuple[str, str]]:
    """Labels and texts of the figures that were observed."""
    rows = [
        ("requests", _text(summary["requests"])),
        ("completed", _text(summary["completed"])),
        ("rejected", _counts(summary["rejected"])),
        ("failed", _counts(summary["failed"])),
        ("unfinished", _text(summary["unfinished"])),
        ("warm-up requests", _text(summary["warmup_requests"])),
        ("effective request capacity", _share(summary["effective_request_capacity"])),
        ("goodput, requests/s", _text(summary["goodput_rps"])),
        ("output tokens/s", _text(summary["output_tokens_per_s"])),
        ("token hit ratio", _share(summary["token_hit_ratio"])),
        ("prefill tokens avoided", _text(summary["prefill_tokens_avoided"])),
        ("wasted prefill tokens", _text(summary["wasted_prefill_tokens"])),
        ("false rejections", _text(summary["false_rejections"])),
        ("load, max over mean", _text(summary["load_max_over_mean"])),
        ("completed per GPU-hour", _text(summary["completed_per_gpu_hour"])),
        ("estimate error, median", _error(summary["estimate_error"], "median_absolute")),
        ("estimate error, bias", _error(summary["estimate_error"], "bias")),
        ("duration, s", _text(summary["duration_s"])),
        ("wall time, s", _text(summary["wall_s"])),
        *((f"bytes moved, {path}", _text(moved)) for path, moved in _mapping(summary["bytes_moved"]).items()),
    ]
    return [(label, text) for label, text in rows if text]


def write_json(value: Summary, target: str) -> None:
    """Write `value` to the file `target`, or to standard output."""
    text = json.dumps(value, indent=2, sort_keys=False, allow_nan=False) + "\n"
    if target == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


def _mapping(value: object) -> Mapping[str, object]:
    return cast(Mapping[str, object], value)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"


def _share(value: object) -> str:
    return "" if value is None else f"{cast(float, value):.1%}"


def _error(error: object, name: str) -> str:
    return "" if error is None else _share(_mapping(error)[name])


def _counts(value: object) -> str:
    counts = cast(Mapping[str, int], value)
    total = sum(counts.values())
    parts = ", ".join(f"{reason} {count}" for reason, count in counts.items())
    return f"{total} ({parts})" if counts else "0"
