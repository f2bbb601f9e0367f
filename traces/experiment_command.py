"""`conductor experiment`: runs an experiment of a paper and prints its figures beside ours, and which claims hold.

Its JSON is described by `experiment.schema.json`, that of `conductor compare` by `comparison.schema.json`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.table import Table

from traces.console import ExitCode, bad_input, progress_bar, remark_on_reading, standard_output
from traces.experiments.experiment import Experiment, Findings
from traces.formats import Trace
from traces.generate import generate
from traces.report import STANDARD_OUTPUT, write_json
from traces.schema import TraceRequest

SCHEMA_VERSION = 1


def run_experiment(experiment: Experiment, trace: Trace | None, limit: int | None, json_target: str | None) -> ExitCode:
    """Exit code 1 when a claim does not hold. Without a trace its workload is generated, `limit` requests of it.

    Raises typer.Exit with a line of error when the trace cannot be read.
    """
    with bad_input():
        source: Iterable[TraceRequest] = generate(experiment.workload, limit or experiment.requests) if trace is None else trace
        requests = list(source)
        if trace is not None:
            remark_on_reading(trace.report)
        with progress_bar(experiment.name, experiment.steps()) as bar:
            task = bar.task_ids[0]
            begun = iter(range(experiment.steps()))
            findings = experiment.run(requests, lambda label: bar.update(task, completed=next(begun), note=label))
            bar.update(task, completed=experiment.steps(), note="")
    name = f"{experiment.workload} look-alike" if trace is None else trace.path.name
    if json_target != STANDARD_OUTPUT:
        _print(experiment, f"{name}, {len(requests):,} requests", findings)
    if json_target is not None:
        write_json(as_json(experiment, name, len(requests), findings), json_target)
    return ExitCode.DONE if all(claim.holds for claim in findings.claims) else ExitCode.REQUESTS_FAILED


def _print(experiment: Experiment, trace: str, findings: Findings) -> None:
    table = Table(title=f"{experiment.name} ({experiment.source}) on {trace}", title_justify="left")
    table.add_column("")
    table.add_column("paper")
    for column in findings.columns:
        table.add_column(column, justify="right")
    for row in findings.rows:
        table.add_row(row.label, row.paper or "", *(f"{figure:,.3f}" for figure in row.ours))
    verdicts = Table(show_header=True)
    for column in ("claim", "holds", "ours"):
        verdicts.add_column(column)
    for claim in findings.claims:
        verdicts.add_row(claim.text, "yes" if claim.holds else "NO", claim.ours)
    out = standard_output()
    out.print(table)
    out.print(verdicts)


def _measured(columns: Sequence[str], figures: Sequence[float]) -> dict[str, float | None]:
    """Figures by column; None for what was not measured, since JSON has no number for it."""
    return {column: figure if math.isfinite(figure) else None for column, figure in zip(columns, figures, strict=True)}


def as_json(experiment: Experiment, trace: str, requests: int, findings: Findings) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "experiment": experiment.name,
        "source": experiment.source,
        "trace": trace,
        "requests": requests,
        "rows": [
            {"label": row.label, "paper": row.paper, "ours": _measured(findings.columns, row.ours)} for row in findings.rows
        ],
        "claims": [{"claim": claim.text, "holds": claim.holds, "ours": claim.ours} for claim in findings.claims],
    }
