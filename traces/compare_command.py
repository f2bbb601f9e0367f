"""`conductor compare`: a bar while cells run, then one row a cell, JSON to keep."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from rich.table import Table

from traces.compare import Cell, Summary, compare, run_serially
from traces.console import fail, progress_bar, standard_output
from traces.report import STANDARD_OUTPUT, write_json
from traces.schema import TraceError


def run_comparison(cells: Sequence[Cell], directory: Path, ray_address: str | None, json_target: str | None) -> None:
    """Compute what is missing of `cells` and print all. Raises typer.Exit with a line of error."""
    spread = ray_address is not None or (len(cells) > 1 and (os.cpu_count() or 1) > 1)
    run = partial(_on_ray, address=ray_address) if spread else run_serially
    try:
        with progress_bar("compare", len(cells)) as bar:

            def done(cell: Cell, computed: bool) -> None:
                bar.update(bar.task_ids[0], advance=1, note=f"{cell.name}{'' if computed else ' (kept)'}")

            summaries = compare(cells, directory, run, done)
    except (TraceError, OSError, ConnectionError) as error:
        raise fail(str(error)) from error
    if json_target != STANDARD_OUTPUT:
        standard_output().print(comparison_table(cells, summaries))
    if json_target is not None:
        write_json({"cells": {cell.name: row for cell, row in zip(cells, summaries, strict=True)}}, json_target)


def comparison_table(cells: Sequence[Cell], summaries: Sequence[Summary]) -> Table:
    """One row a cell: what an operator chooses by."""
    table = Table(title="comparison", title_justify="left")
    for column in ("policy", "speed", "seed", "TTFT mean", "p90", "p99", "TBT p90", "hit ratio", "rejected", "capacity"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for cell, figures in zip(cells, summaries, strict=True):
        config = cell.options.scheduler
        rejected = sum(cast(Mapping[str, int], figures["rejected"]).values())
        table.add_row(
            config.policy,
            f"{cell.options.speed:g}",
            str(config.seed),
            *(_seconds(figures["ttft_s"], name) for name in ("mean", "p90", "p99")),
            _seconds(figures["tbt_s"], "p90"),
            _share(figures["token_hit_ratio"]),
            f"{rejected:,}",
            _share(figures["effective_request_capacity"]),
        )
    return table


def _on_ray(cells: Sequence[Cell], address: str | None) -> Iterator[tuple[int, Summary]]:
    from traces.distributed import run_on_ray  # Ray takes longer to import than the rest of the command line

    return run_on_ray(cells, address)


def _seconds(distribution: object, name: str) -> str:
    return "" if distribution is None else f"{cast(Mapping[str, float], distribution)[name]:.3f}"


def _share(value: object) -> str:
    return "" if value is None else f"{cast(float, value):.1%}"
