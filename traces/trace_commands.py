"""`conductor trace stats | generate | convert | fetch`: what each does between its flags and its output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import httpx
from rich.progress import Progress

from traces.console import ExitCode, fail, progress_bar, remark_on_reading, standard_output
from traces.fetch import AddressError, FetchError, fetch
from traces.formats import Trace
from traces.formats.writer import write_mooncake
from traces.report import STANDARD_OUTPUT, write_json
from traces.schema import TraceRequest
from traces.stats import StatsOptions, collect
from traces.stats_report import stats_tables

REPORT_EVERY = 200


def run_stats(trace: Trace, options: StatsOptions, json_target: str | None) -> None:
    """Print the statistics and write them as JSON where asked. Raises TraceError and TooManyBlocks."""
    with progress_bar("stats", trace.limit) as bar:
        found = collect(_counted(trace, bar), options)
    remark_on_reading(trace.report)
    if json_target != STANDARD_OUTPUT:
        for table in stats_tables(trace.path.name, found):
            standard_output().print(table)
    if json_target is not None:
        write_json({"trace": trace.path.name, **found.as_json(), "read_report": trace.report.as_json()}, json_target)


def run_write(requests: Iterable[TraceRequest], output: Path, block_tokens: int) -> None:
    """Write `requests` as Mooncake JSONL and say how many there were."""
    with progress_bar("write", None) as bar:
        count = write_mooncake(_counted(requests, bar), output, block_tokens)
    standard_output().print(f"{output}: {count} requests", soft_wrap=True, highlight=False)


def run_fetch(url: str, output: Path | None, sha256: str | None) -> None:
    """Download `url`, with a bar, and say what came."""
    target = output or Path(PurePosixPath(httpx.URL(url).path).name or "trace")
    try:
        with progress_bar("fetch, bytes", None) as bar:
            fetched = fetch(
                url,
                target,
                sha256=sha256,
                progress=lambda done, total: bar.update(bar.task_ids[0], completed=done, total=total),
            )
    except AddressError as error:
        raise fail(str(error)) from error
    except FetchError as error:
        raise fail(str(error), ExitCode.UNREACHABLE) from error
    except (httpx.InvalidURL, OSError) as error:
        raise fail(f"{url}: {error}") from error
    standard_output().print(f"{target}: {fetched.size_bytes} bytes, sha256 {fetched.sha256}", soft_wrap=True, highlight=False)


def _counted(requests: Iterable[TraceRequest], bar: Progress) -> Iterator[TraceRequest]:
    number = 0
    for number, request in enumerate(requests, start=1):
        yield request
        if number % REPORT_EVERY == 0:
            bar.update(bar.task_ids[0], completed=number)
    bar.update(bar.task_ids[0], completed=number, total=number)
