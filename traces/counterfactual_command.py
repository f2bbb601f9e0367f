"""How `conductor counterfactual` prints what it found: totals of the three sides, and the requests that change most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from traces.counterfactual import Difference, totals

SIDES = {"recorded": "recorded", "before": "simulated, policy in force", "after": "simulated, other policy"}
SHOWN = 10


def as_json(differences: Sequence[Difference]) -> dict[str, object]:
    return {
        "totals": {side: totals(differences, side) for side in SIDES},
        "requests": [asdict(difference) for difference in differences],
    }


def show(differences: Sequence[Difference], console: Console) -> None:
    table = Table(title="totals")
    for column in ("", "requests", "mean TTFT, s", "reused tokens", "rejected"):
        table.add_column(column, justify="right" if column else "left")
    for side, title in SIDES.items():
        figures = totals(differences, side)
        table.add_row(title, *(_text(figures[name]) for name in ("requests", "mean_ttft_s", "reused_tokens", "rejected")))
    console.print(table)
    changed = Table(title=f"the {SHOWN} requests whose TTFT changes most")
    for column in ("request", "recorded TTFT, s", "in force", "other", "change", "reused, in force", "reused, other"):
        changed.add_column(column, justify="right" if column != "request" else "left")
    for difference in sorted(differences, key=lambda one: -abs(_change_s(one)))[:SHOWN]:
        before, after = difference.before, difference.after
        changed.add_row(
            difference.request_id,
            _text(difference.recorded.ttft_s),
            _verdict(before.ttft_s, before.rejected),
            _verdict(after.ttft_s, after.rejected),
            f"{_change_s(difference):+.3f}",
            str(before.reused_tokens),
            str(after.reused_tokens),
        )
    console.print(changed)


def _change_s(difference: Difference) -> float:
    before, after = difference.before.ttft_s, difference.after.ttft_s
    return 0.0 if before is None or after is None else after - before


def _verdict(ttft_s: float | None, rejected: bool) -> str:
    return "rejected" if rejected else _text(ttft_s)


def _text(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
