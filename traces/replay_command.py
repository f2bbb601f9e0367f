"""`conductor replay`: a trace against an endpoint, with a bar while it runs, a table, JSON and HTML at the end.

The whole trace is checked before the first request leaves. Ctrl-C stops sending, cancels what is in flight and still writes
the report; a second Ctrl-C ends the command at once.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import Progress

from traces.console import ExitCode, fail, progress_bar, remark_on_reading, standard_error, standard_output
from traces.formats import Trace
from traces.live_server import EndpointError
from traces.outcomes import OutcomeStatus, RequestOutcome, RunResult
from traces.replay import LiveOptions, replay_live
from traces.report import STANDARD_OUTPUT, figures_table, latency_table, write_json
from traces.schema import TraceError
from traces.summary import summarise

NOTICEABLE_LAG_S = 0.1


@dataclass(frozen=True, slots=True)
class ReportTargets:
    """Where reports go besides the table: files, `-` for JSON on standard output, or nowhere."""

    json: str | None = None
    html: Path | None = None


def run_replay(trace: Trace, options: LiveOptions, targets: ReportTargets) -> ExitCode:
    """Replay and report. Raises typer.Exit, with a line on standard error, when nothing could be replayed."""
    try:
        total = sum(1 for _ in trace)
        remark_on_reading(trace.report)
        with progress_bar("replay", total) as bar:
            run = asyncio.run(_replay(trace, options, bar))
    except TraceError as error:
        raise fail(str(error)) from error
    except EndpointError as error:
        raise fail(str(error), ExitCode.UNREACHABLE) from error
    run = replace(run, read_report=trace.report.as_json())
    summary = summarise(run)
    write_reports(run, summary, targets)
    _remark_on_lag(run)
    return _exit_code(run)


def write_reports(run: RunResult, summary: Mapping[str, object], targets: ReportTargets) -> None:
    """The table on standard output unless JSON goes there, and the files that were asked for."""
    if targets.json != STANDARD_OUTPUT:
        out = standard_output()
        out.print(latency_table(summary))
        out.print(figures_table(summary))
    if targets.json is not None:
        write_json(summary, targets.json)
    if targets.html is not None:
        from traces.html_report import write_html  # matplotlib takes longer to import than the rest of the command line

        write_html(run, summary, targets.html)


async def _replay(trace: Trace, options: LiveOptions, bar: Progress) -> RunResult:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        standard_error().print("[yellow]stopping:[/] cancelling what is in flight", highlight=False)
        stop.set()

    counts: Counter[OutcomeStatus] = Counter()

    def progress(outcome: RequestOutcome) -> None:
        counts[outcome.status] += 1
        note = f"{counts[OutcomeStatus.REJECTED]} rejected, {counts[OutcomeStatus.FAILED]} failed"
        bar.update(bar.task_ids[0], advance=1, note=note)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return await replay_live(trace, options, name=trace.path.name, progress=progress, stop=stop)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _remark_on_lag(run: RunResult) -> None:
    late = sum((outcome.lag_s or 0.0) > NOTICEABLE_LAG_S for outcome in run.outcomes if not outcome.warmup)
    if late:
        text = f"{late} requests left more than {NOTICEABLE_LAG_S:g} s late: the load was lighter than the trace's"
        standard_error().print(f"[yellow]note:[/] {text}", highlight=False, soft_wrap=True)


def _exit_code(run: RunResult) -> ExitCode:
    if run.interrupted:
        return ExitCode.STOPPED
    failed = any(outcome.status is OutcomeStatus.FAILED for outcome in run.outcomes)
    return ExitCode.REQUESTS_FAILED if failed else ExitCode.DONE
