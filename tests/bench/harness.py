"""What every benchmark returns and how it is printed.

A benchmark is a module `tests/bench/bench_<name>.py` with a `run() -> Report`. It measures both sides of each ratio in
the same process run; absolute times are printed beside the ratio and never judged.
"""

from __future__ import annotations

import importlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
LONG = ("soak",)


@dataclass(frozen=True)
class Figure:
    """One measured value, and the bound that it is held to where there is one."""

    name: str
    value: float | None
    unit: str
    bound: str = ""
    holds: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Report:
    name: str
    figures: Sequence[Figure]
    command: str
    details: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        flat = {figure.name: figure.value for figure in self.figures}
        return {
            "bench": self.name,
            **flat,
            "figures": [asdict(figure) for figure in self.figures],
            "details": dict(self.details),
        }


def at_most(name: str, value: float, limit: float, unit: str, note: str = "") -> Figure:
    return Figure(name, value, unit, f"<= {limit:g}", value <= limit, note)


def at_least(name: str, value: float, limit: float, unit: str, note: str = "") -> Figure:
    return Figure(name, value, unit, f">= {limit:g}", value >= limit, note)


def names() -> list[str]:
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def usual() -> list[str]:
    """What runs when nothing is named: all that take minutes at most."""
    return [name for name in names() if name not in LONG]


def run(name: str) -> Report:
    if name not in names():
        raise ValueError(f"benchmark {name!r} is not known; choose from: {', '.join(names())}")
    report = importlib.import_module(f"tests.bench.bench_{name}").run()
    assert isinstance(report, Report)
    return report


def show(report: Report, console: Console) -> None:
    table = Table(title=f"{report.name}  ({report.command}; {platform.machine()}, Python {platform.python_version()})")
    for column in ("figure", "value", "unit", "must be", "holds", "note"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for figure in report.figures:
        verdict = "" if figure.holds is None else ("yes" if figure.holds else "NO")
        value = "not measured" if figure.value is None else f"{figure.value:,.4g}"
        table.add_row(figure.name, value, figure.unit, figure.bound, verdict, figure.note)
    console.print(table)


def write_json(reports: Sequence[Report], target: str) -> None:
    """`-` is standard output, and then nothing else is written to it."""
    text = json.dumps([report.to_json() for report in reports] if len(reports) != 1 else reports[0].to_json(), indent=2)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")
