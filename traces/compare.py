"""Many simulations of one trace: every combination of policy, speed and seed, in any order, on one machine or many.

Each combination is a cell with a name of its own; its figures go to a file of that name as soon as they are known, together
with a fingerprint of everything that they depend on. A comparison that was interrupted takes up what is there and computes
the rest; figures under another fingerprint are computed anew. A cell's figures do not depend on where or when it ran.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, cast

from conductor.core.placement import Policy
from traces.formats import open_trace
from traces.simulator import SimulationOptions, simulate
from traces.summary import summarise

Summary: TypeAlias = dict[str, object]
NOT_IN_NAMES = r"[^\w.-]"


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Where the requests come from, so that another process can read them too."""

    path: Path
    format_name: str | None = None
    block_tokens: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation of a comparison."""

    source: TraceSource
    options: SimulationOptions

    @property
    def name(self) -> str:
        config = self.options.scheduler
        return f"{re.sub(NOT_IN_NAMES, '_', config.policy)}-speed{self.options.speed:g}-seed{config.seed}"

    def fingerprint(self, trace_digest: str) -> str:
        """Changes whenever the figures could: with the trace's content, the cluster, the options, the policy's own code."""
        options = replace(self.options, policy=None)
        code = "" if self.options.policy is None else inspect.getsource(inspect.unwrap(self.options.policy))
        return hashlib.sha256(f"{trace_digest} {self.source.limit} {options!r} {code}".encode()).hexdigest()


RunCells: TypeAlias = Callable[[Sequence[Cell]], Iterator[tuple[int, Summary]]]
"""Simulates cells in any order; yields each one's number and figures as they come."""


def cells_of(
    source: TraceSource,
    base: SimulationOptions,
    policies: Mapping[str, Policy],
    speeds: Iterable[float],
    seeds: Iterable[int],
) -> list[Cell]:
    """Every combination, policies outermost."""
    return [
        Cell(source, replace(base, speed=speed, policy=policy, scheduler=replace(base.scheduler, policy=name, seed=seed)))
        for name, policy in policies.items()
        for speed in speeds
        for seed in seeds
    ]


def simulate_cell(cell: Cell) -> Summary:
    """The figures of one cell. Raises TraceError when the trace cannot be read."""
    source = cell.source
    trace = open_trace(source.path, format_name=source.format_name, limit=source.limit, block_tokens=source.block_tokens)
    return summarise(simulate(trace, cell.options, name=source.path.name))


def run_serially(cells: Sequence[Cell]) -> Iterator[tuple[int, Summary]]:
    """One after another in this process."""
    for number, cell in enumerate(cells):
        yield number, simulate_cell(cell)


def compare(cells: Sequence[Cell], directory: Path, run: RunCells, done: Callable[[Cell, bool], None]) -> list[Summary]:
    """Figures of all `cells`, in their order. `done` hears of each one, and whether it was computed now."""
    directory.mkdir(parents=True, exist_ok=True)
    digest = _digest(cells[0].source.path) if cells else ""
    known = [_known(directory, cell, digest) for cell in cells]
    missing = [number for number, figures in enumerate(known) if figures is None]
    for cell, figures in zip(cells, known, strict=True):
        if figures is not None:
            done(cell, False)
    for place, summary in run([cells[number] for number in missing]):
        number = missing[place]
        _keep(directory, cells[number], digest, summary)
        known[number] = summary
        done(cells[number], True)
    return [figures for figures in known if figures is not None]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _known(directory: Path, cell: Cell, digest: str) -> Summary | None:
    """Figures left by an earlier run, if they are of this very cell; a damaged file counts as none."""
    try:
        kept = json.loads((directory / f"{cell.name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(kept, dict) or kept.get("fingerprint") != cell.fingerprint(digest):
        return None
    return cast(Summary, kept["figures"])


def _keep(directory: Path, cell: Cell, digest: str, summary: Summary) -> None:
    """Written whole or not at all, so that an interruption leaves no half file."""
    path = directory / f"{cell.name}.json"
    draft = path.with_suffix(".tmp")
    kept = {"cell": cell.name, "fingerprint": cell.fingerprint(digest), "figures": summary}
    draft.write_text(json.dumps(kept, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    draft.replace(path)
