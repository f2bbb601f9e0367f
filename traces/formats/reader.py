"""Read a trace file of any known format, one request at a time.

The format is told by the columns of the first line unless the caller names it. Faults are counted in the trace's report and
skipped, or raised when `strict`; a file without one readable request always raises. Memory does not grow with the file.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from traces.formats.azure import AZURE
from traces.formats.bailian import BAILIAN
from traces.formats.base import FileKind, TraceFormat
from traces.formats.burstgpt import BURSTGPT
from traces.formats.lines import file_fault, read_lines
from traces.formats.mooncake import MOONCAKE
from traces.formats.rows import Row, shown
from traces.schema import Fault, ReadReport, SkipReason, TraceError, TraceRequest

FORMATS: Mapping[str, TraceFormat] = {each.name: each for each in (MOONCAKE, AZURE, BURSTGPT, BAILIAN)}


@dataclass(slots=True)
class Trace:
    """A trace file. Every iteration reads it anew and holds one row; `report` tells what the latest one met."""

    path: Path
    format: TraceFormat
    strict: bool = False
    limit: int | None = None
    report: ReadReport = field(default_factory=ReadReport)

    def __iter__(self) -> Iterator[TraceRequest]:
        self.report = ReadReport()
        latest_s = 0.0
        origin_s: float | None = None if self.format.from_first_row else 0.0
        for item in _rows(self.path, self.format):
            if self.limit is not None and self.report.requests >= self.limit:
                return
            try:
                request = self._parse(item)
                origin_s = request.timestamp_s if origin_s is None else origin_s
                request = _in_order(item, request, origin_s, latest_s)
            except TraceError as error:
                self._skip(error.fault)
                continue
            latest_s = request.timestamp_s
            self.report.requests += 1
            yield request
        if self.report.requests == 0:
            raise TraceError(self._nothing_read())

    def _parse(self, item: Row | Fault) -> TraceRequest:
        if isinstance(item, Fault):
            raise TraceError(item)
        for column in item.values.keys() - self.format.columns:
            if self.strict:
                allowed = f"the columns {', '.join(sorted(self.format.columns))}"
                raise item.error(SkipReason.UNKNOWN_COLUMN, "column", column, allowed)
            self.report.ignored_columns[column] += 1
        return self.format.parse(item, self.format.block_tokens)

    def _skip(self, fault: Fault) -> None:
        if self.strict:
            raise TraceError(fault)
        self.report.skip(fault)

    def _nothing_read(self) -> Fault:
        allowed = f"at least one {self.format.name} request"
        if not self.report.examples:
            return file_fault(self.path, SkipReason.NO_REQUEST, "empty", allowed)
        value = f"without a readable request ({self.report.skipped_rows} rows skipped, first: {self.report.examples[0]})"
        return file_fault(self.path, SkipReason.NO_REQUEST, value, allowed)


def open_trace(
    path: Path,
    *,
    format_name: str | None = None,
    strict: bool = False,
    limit: int | None = None,
    block_tokens: int | None = None,
) -> Trace:
    """The trace in `path`. Raises TraceError when the file cannot be opened or its format not be told.

    `block_tokens` overrides what one id stands for, for files in a known format with blocks of another size.
    """
    chosen = sniff(path) if format_name is None else _named(path, format_name)
    if block_tokens is not None:
        chosen = replace(chosen, block_tokens=block_tokens)
    return Trace(path, chosen, strict, limit)


def sniff(path: Path) -> TraceFormat:
    """The format whose required columns the first readable line has."""
    for number, text in read_lines(path):
        if number > 100:
            break
        if isinstance(text, Fault):
            continue
        names = _column_names(text)
        fits = [each for each in FORMATS.values() if names.issuperset(each.required)]
        if fits:
            return max(fits, key=lambda each: len(each.required))
        if not text.lstrip().startswith("{"):
            break
    allowed = f"one of the formats {', '.join(FORMATS)} (or name it with --format)"
    raise TraceError(file_fault(path, SkipReason.NO_REQUEST, "of no known format, or empty", allowed))


def _named(path: Path, name: str) -> TraceFormat:
    if name not in FORMATS:
        raise TraceError(Fault(SkipReason.BAD_VALUE, str(path), None, "format", shown(name), ", ".join(FORMATS)))
    return FORMATS[name]


def _column_names(text: str) -> set[str]:
    if text.lstrip().startswith("{"):
        try:
            return set(_json_object(text))
        except (ValueError, RecursionError):
            return set()
    return set(_cells(text) or ())


def _rows(path: Path, chosen: TraceFormat) -> Iterator[Row | Fault]:
    return _json_rows(path) if chosen.kind is FileKind.JSONL else _csv_rows(path, chosen)


def _json_rows(path: Path) -> Iterator[Row | Fault]:
    for number, text in read_lines(path):
        if isinstance(text, Fault):
            yield text
            continue
        try:
            yield Row(str(path), number, _json_object(text))
        except (ValueError, RecursionError) as error:
            value = f"not a whole JSON object ({error})" if isinstance(error, ValueError) else "nested too deeply"
            yield Fault(SkipReason.NOT_JSON, str(path), number, "line", value, "one JSON object a line")


def _json_object(text: str) -> dict[str, object]:
    value = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(value, dict):
        raise ValueError(f"found {shown(value)}")
    return value


def _refuse_constant(word: str) -> object:
    raise ValueError(f"{word} is not a JSON number")


def _csv_rows(path: Path, chosen: TraceFormat) -> Iterator[Row | Fault]:
    header: list[str] | None = None
    for number, text in read_lines(path):
        if isinstance(text, Fault):
            yield text
            continue
        cells = _cells(text)
        if header is None:
            header = _header(path, number, cells or [], chosen)
        elif cells is None or len(cells) != len(header):
            value = "broken quoting" if cells is None else f"{len(cells)} cells"
            yield Fault(SkipReason.COLUMN_COUNT, str(path), number, "line", value, f"{len(header)} cells")
        else:
            yield Row(str(path), number, dict(zip(header, cells, strict=True)))


def _cells(text: str) -> list[str] | None:
    try:
        return next(csv.reader([text.rstrip("\r\n")], strict=True))
    except (csv.Error, StopIteration):
        return None


def _header(path: Path, number: int, cells: list[str], chosen: TraceFormat) -> list[str]:
    """The column names. Raises TraceError when a required one is missing: no row could be read."""
    header = [cell.strip() for cell in cells]
    missing = [name for name in chosen.required if name not in header]
    if missing:
        allowed = f"a header with the columns {', '.join(chosen.required)}"
        raise TraceError(Fault(SkipReason.MISSING_FIELD, str(path), number, "header", shown(header), allowed))
    return header


def _in_order(item: Row | Fault, request: TraceRequest, origin_s: float, latest_s: float) -> TraceRequest:
    """`request` on the trace's own clock. Raises TraceError when it lies before the one that went ahead of it."""
    at_s = request.timestamp_s - origin_s
    if at_s < latest_s:
        allowed = f"at or after the previous request, {latest_s} s"
        raise TraceError(Fault(SkipReason.UNORDERED_TIME, item.file, item.line, "time", f"{at_s} s", allowed))
    return request if origin_s == 0.0 else replace(request, timestamp_s=at_s)
