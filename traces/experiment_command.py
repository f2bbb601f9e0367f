"""`conductor experiment`: runs an experiment of the paper and prints its figures beside ours, and which claims hold."""

from __future__ import annotations

from rich.table import Table

from traces.console import ExitCode, fail, progress_bar, remark_on_reading, standard_output
from traces.experiments.experiment import Claim, Experiment
from traces.formats import Trace
from traces.outcomes import RunResult
from traces.report import STANDARD_OUTPUT, write_json
from traces.schema import TraceError
from traces.simulator import simulate


def run_experiment(experiment: Experiment, trace: Trace, json_target: str | None) -> ExitCode:
    """Exit code 1 when a claim does not hold. Raises typer.Exit with a line of error when the trace cannot be read."""
    variants = experiment.variants()
    runs: dict[str, RunResult] = {}
    try:
        requests = list(trace)
        remark_on_reading(trace.report)
        with progress_bar(experiment.name, len(variants)) as bar:
            for variant in variants:
                bar.update(bar.task_ids[0], note=variant.label)
                runs[variant.label] = simulate(requests, variant.options, name=trace.path.name)
                bar.update(bar.task_ids[0], advance=1)
    except TraceError as error:
        raise fail(str(error)) from error
    rows = [(variant.label, variant.paper, experiment.figure(runs[variant.label])) for variant in variants]
    claims = list(experiment.judge(runs))
    if json_target != STANDARD_OUTPUT:
        _print(experiment, rows, claims)
    if json_target is not None:
        write_json(_as_json(experiment, rows, claims), json_target)
    return ExitCode.DONE if all(claim.holds for claim in claims) else ExitCode.REQUESTS_FAILED


def _print(experiment: Experiment, rows: list[tuple[str, str | None, float]], claims: list[Claim]) -> None:
    table = Table(title=f"{experiment.name} ({experiment.source}): {experiment.figure_name}", title_justify="left")
    for column in ("", "paper", "ours"):
        table.add_column(column, justify="right" if column else "left")
    for label, paper, figure in rows:
        table.add_row(label, paper or "", f"{figure:.3f}")
    verdicts = Table(show_header=True)
    for column in ("claim", "holds", "ours"):
        verdicts.add_column(column)
    for claim in claims:
        verdicts.add_row(claim.text, "yes" if claim.holds else "NO", claim.ours)
    out = standard_output()
    out.print(table)
    out.print(verdicts)


def _as_json(experiment: Experiment, rows: list[tuple[str, str | None, float]], claims: list[Claim]) -> dict[str, object]:
    return {
        "experiment": experiment.name,
        "source": experiment.source,
        "figure": experiment.figure_name,
        "rows": [{"label": label, "paper": paper, "ours": figure} for label, paper, figure in rows],
        "claims": [{"claim": claim.text, "holds": claim.holds, "ours": claim.ours} for claim in claims],
    }
