"""`conductor simulate`: one replay in virtual time, with a bar while it runs; then a table, JSON, HTML and a flight log."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from rich.progress import Progress

from conductor.core.commands import Command, Reject
from conductor.core.config import SchedulerConfig
from conductor.core.events import Event, RequestFinished
from traces.console import ExitCode, fail, progress_bar, remark_on_reading, standard_error
from traces.formats import Trace
from traces.outcomes import OutcomeStatus, RunResult
from traces.replay_command import ReportTargets, write_reports
from traces.schema import TraceError, TraceRequest
from traces.simulator import Observer, SimulationOptions, simulate
from traces.summary import summarise

FlightLogOpener: TypeAlias = Callable[[Path, SchedulerConfig], AbstractContextManager[Observer]]
"""Opens a flight log for a scheduler of that configuration; what it yields records one call of `handle`."""


def run_simulation(
    trace: Trace,
    options: SimulationOptions,
    targets: ReportTargets,
    flight_log: AbstractContextManager[Observer] | None = None,
) -> ExitCode:
    """Simulate and report. Raises typer.Exit, with a line on standard error, when nothing could be simulated."""
    try:
        requests = list(trace)
        remark_on_reading(trace.report)
        started_s = time.perf_counter()
        run = _simulate_with_bar(requests, trace.path.name, options, flight_log)
    except (TraceError, OSError, ValueError) as error:
        raise fail(str(error)) from error
    took_s = time.perf_counter() - started_s
    run = replace(run, read_report=trace.report.as_json())
    write_reports(run, summarise(run), targets)
    standard_error().print(f"simulated {len(requests)} requests in {took_s:.1f} s", highlight=False)
    return exit_code(run)


def exit_code(run: RunResult) -> ExitCode:
    """Failed requests show in the exit code; refused ones are an answer, not a failure."""
    failed = any(outcome.status is OutcomeStatus.FAILED for outcome in run.outcomes)
    return ExitCode.REQUESTS_FAILED if failed else ExitCode.DONE


def _simulate_with_bar(
    requests: Sequence[TraceRequest],
    name: str,
    options: SimulationOptions,
    flight_log: AbstractContextManager[Observer] | None,
) -> RunResult:
    with ExitStack() as stack:
        record = None if flight_log is None else stack.enter_context(flight_log)
        bar = stack.enter_context(progress_bar("simulate", len(requests)))
        return simulate(requests, options, name=name, observer=_counting(bar, record))


def _counting(bar: Progress, record: Observer | None) -> Observer:
    """Moves the bar with every request that ends, and passes on to `record`."""
    task = bar.task_ids[0]

    def observe(now: float, event: Event, commands: Sequence[Command]) -> None:
        ended = isinstance(event, RequestFinished) + sum(isinstance(command, Reject) for command in commands)
        if ended:
            bar.update(task, advance=ended)
        if record is not None:
            record(now, event, commands)

    return observe
