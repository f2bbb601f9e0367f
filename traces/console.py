"""How the trace commands speak: figures on standard output, progress and remarks on standard error, exit codes that mean
something."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from traces.schema import ReadReport

WIDTH_IN_FILES = 140


class ExitCode(IntEnum):
    """0: done. 1: done, but requests failed. 2: bad input. 3: the endpoint or address does not answer. 130: stopped."""

    DONE = 0
    REQUESTS_FAILED = 1
    BAD_INPUT = 2
    UNREACHABLE = 3
    STOPPED = 130


def standard_output() -> Console:
    """Tables go to files and pipes at a width that they fit into."""
    return Console(soft_wrap=False, width=None if sys.stdout.isatty() else WIDTH_IN_FILES)


def standard_error() -> Console:
    return Console(stderr=True)


def fail(message: str, code: ExitCode = ExitCode.BAD_INPUT) -> typer.Exit:
    """Print one line of error and give the exception that ends the command."""
    standard_error().print(f"[red]error:[/] {escape_markup(message)}", soft_wrap=True, highlight=False)
    return typer.Exit(code)


@contextmanager
def bad_input() -> Iterator[None]:
    """Turn the errors that input can cause (TraceError and other ValueErrors, unwritable files) into a line and exit code 2."""
    try:
        yield
    except ValueError as error:
        raise fail(str(error)) from error
    except OSError as error:
        raise fail(f"{error.filename}: {error.strerror}") from error


def escape_markup(text: str) -> str:
    return text.replace("[", "\\[")


@contextmanager
def progress_bar(description: str, total: int | None) -> Iterator[Progress]:
    """A bar on standard error with one task, number 0."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=standard_error()) as progress:
        progress.add_task(description, total=total, note="")
        yield progress


def remark_on_reading(report: ReadReport) -> None:
    """Say what reading a trace has skipped or ignored; silent when there was nothing."""
    err = standard_error()
    if report.skipped:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(report.skipped.items()))
        err.print(f"[yellow]skipped {report.skipped_rows} rows:[/] {reasons}", highlight=False)
        for fault in report.examples:
            err.print(f"  {escape_markup(str(fault))}", soft_wrap=True, highlight=False)
    for column, count in sorted(report.ignored_columns.items()):
        err.print(f"[yellow]ignored column[/] {escape_markup(column)} in {count} rows", highlight=False)
