"""The flight log: every `(now, event, commands)` of a scheduler's life, one JSON object a line, replayable to the letter.

The first line of a file is its header: schema version, segment number, and the scheduler's own configuration. Worker specs with
their cost profiles arrive inside `WorkerJoined` events, so a log needs nothing beside it. A run goes on in a next file
(`NAME.flight.jsonl`, `NAME.1.flight.jsonl`, ...) when the current one reaches its size, and only the latest `max_segments` are
kept. The log holds lengths and hashes, never token text.

`verify` feeds the events to a fresh scheduler and compares its commands with the recorded ones, exactly. It can do so only from
the beginning of a run: a log whose first segment is gone is refused.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TextIO, TypeVar

from conductor.codec import CodecError, decode, encode
from conductor.core.commands import Command
from conductor.core.events import Event

if TYPE_CHECKING:
    from conductor.config import FlightLogSection

SCHEMA_VERSION = 1
SUFFIX = ".flight.jsonl"
WRITE_BUFFER_BYTES = 256 * 1024

ConfigT = TypeVar("ConfigT")


class FlightLogError(ValueError):
    """A flight log cannot be read; the message names file, line and field."""


class Replayable(Protocol):
    """The part of the scheduler that a replay needs."""

    def handle(self, event: Event, now: float) -> list[Command]: ...


@dataclass(frozen=True, slots=True)
class Header(Generic[ConfigT]):
    """First line of every segment."""

    schema: int
    segment: int
    scheduler: ConfigT


@dataclass(frozen=True, slots=True)
class Record:
    """One call of `Scheduler.handle`."""

    now: float
    event: Event
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first record whose replayed commands are not the recorded ones."""

    number: int
    record: Record
    replayed: tuple[Command, ...]

    def __str__(self) -> str:
        recorded, replayed = (
            [encode(command, Command) for command in commands] for commands in (self.record.commands, self.replayed)
        )
        return (
            f"record {self.number} at {self.record.now}: {type(self.record.event).__name__}\n"
            f"  recorded: {json.dumps(recorded)}\n  replayed: {json.dumps(replayed)}"
        )


@dataclass(frozen=True, slots=True)
class Verification:
    """`difference` is None when every one of `records` was reproduced."""

    records: int
    difference: Difference | None


class FlightLogWriter:
    """Appends records to the run that starts at `path`. A record is on disk after `flush`, `close` or a full buffer."""

    def __init__(self, path: Path, scheduler_config: Any, *, segment_bytes: int, max_segments: int) -> None:
        require_name(path)
        self.path = path
        self._scheduler = encode(scheduler_config, type(scheduler_config))
        self._segment_bytes = segment_bytes
        self._max_segments = max_segments
        self._segment = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._written_bytes = self._open_segment()

    def append(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Record one call of `handle`. Raises OSError when the disk does not take it."""
        if self._written_bytes >= self._segment_bytes:
            self._rotate()
        record = {"now": now, "event": encode(event, Event), "commands": [encode(command, Command) for command in commands]}
        self._written_bytes += self._write(self._file, record)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        self._file.close()
        self._segment += 1
        self._file, self._written_bytes = self._open_segment()
        segment_path(self.path, self._segment - self._max_segments).unlink(missing_ok=True)

    def _open_segment(self) -> tuple[TextIO, int]:
        file = segment_path(self.path, self._segment).open("x", encoding="ascii", buffering=WRITE_BUFFER_BYTES)
        header = {"schema": SCHEMA_VERSION, "segment": self._segment, "scheduler": self._scheduler}
        return file, self._write(file, header)

    @staticmethod
    def _write(file: TextIO, line: dict[str, Any]) -> int:
        return file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")


def require_name(path: Path) -> None:
    """Raises ValueError for a file that would not be known for a flight log."""
    if not path.name.endswith(SUFFIX):
        raise ValueError(f"flight log path {path} is not allowed; expected a name that ends in {SUFFIX}")


@contextmanager
def recording(path: Path, scheduler_config: Any) -> Iterator[Callable[[float, Event, Sequence[Command]], None]]:
    """A flight log in one segment for the time of a block, in place of one that is there; yields what records one call of
    `handle`. Raises ValueError for a path of another kind, before what is there is touched."""
    require_name(path)
    path.unlink(missing_ok=True)
    writer = FlightLogWriter(path, scheduler_config, segment_bytes=sys.maxsize, max_segments=1)
    try:
        yield writer.append
    finally:
        writer.close()


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where the runs of a deployment are recorded, and how much of them is kept."""

    directory: Path
    segment_bytes: int
    max_segments: int
    keep_runs: int

    def open_run(self, scheduler_config: Any) -> FlightLogWriter:
        """The log of a run that begins now; runs beyond the latest `keep_runs` are deleted."""
        prune_runs(self.directory, self.keep_runs - 1)
        name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}{SUFFIX}"
        return FlightLogWriter(
            self.directory / name, scheduler_config, segment_bytes=self.segment_bytes, max_segments=self.max_segments
        )


def segment_path(path: Path, segment: int) -> Path:
    """File of a segment of the run that starts at `path`."""
    return path if segment == 0 else path.with_name(f"{path.name.removesuffix(SUFFIX)}.{segment}{SUFFIX}")


def prune_runs(directory: Path, keep: int) -> None:
    """Delete all but the latest `keep` runs of a directory, by the names of their first segments, which begin with the time."""
    if not directory.is_dir():
        return
    segments = sorted(path for path in directory.iterdir() if path.name.endswith(SUFFIX))
    runs = sorted({path.name.split(".", 1)[0] for path in segments})
    doomed = set(runs[: max(0, len(runs) - keep)])
    for path in segments:
        if path.name.split(".", 1)[0] in doomed:
            path.unlink(missing_ok=True)


def read_header(path: Path, config_type: type[ConfigT]) -> Header[ConfigT]:
    """The header of one file. Raises `FlightLogError`."""
    with _open(path) as file:
        return _parse_header(_parse_json(path, 1, file.readline()), path, config_type)


def read(path: Path, config_type: type[ConfigT]) -> tuple[Header[ConfigT], Iterator[Record]]:
    """The header of the run that starts at `path`, and its records through all segments, read lazily.

    Raises `FlightLogError`, also while the records are read.
    """
    header = read_header(path, config_type)
    if header.segment != 0:
        raise FlightLogError(f"{path}: segment {header.segment} is not the beginning of a run; pass segment 0")
    return header, _records(path, config_type)


def verify(path: Path, config_type: type[ConfigT], make_scheduler: Callable[[ConfigT], Replayable]) -> Verification:
    """Replay the run that starts at `path` into a fresh scheduler, up to the first difference."""
    header, records = read(path, config_type)
    scheduler = make_scheduler(header.scheduler)
    count = 0
    for record in records:
        count += 1
        replayed = tuple(scheduler.handle(record.event, record.now))
        if replayed != record.commands:
            return Verification(count, Difference(count, record, replayed))
    return Verification(count, None)


def _records(path: Path, config_type: type[Any]) -> Iterator[Record]:
    segment, current = 0, path
    while current.exists():
        with _open(current) as file:
            for number, line in enumerate(file, start=1):
                data = _parse_json(current, number, line)
                if number > 1:
                    yield _parse_record(data, f"{current}, line {number}")
                elif _parse_header(data, current, config_type).segment != segment:
                    raise FlightLogError(f"{current}, line 1: field segment is not {segment}; the file belongs to another run")
        segment += 1
        current = segment_path(path, segment)


def _open(path: Path) -> TextIO:
    try:
        return path.open(encoding="ascii", errors="surrogateescape")
    except OSError as error:
        raise FlightLogError(f"cannot read {path}: {error.strerror}") from None


def _parse_json(path: Path, number: int, line: str) -> dict[str, Any]:
    if not line.isascii():
        raise FlightLogError(f"{path}, line {number}: bytes beyond ASCII are not allowed; expected JSON in ASCII")
    try:
        data = json.loads(line)
    except RecursionError:
        raise FlightLogError(f"{path}, line {number}: not JSON (nested too deeply)") from None
    except json.JSONDecodeError as error:
        raise FlightLogError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(data, dict):
        raise FlightLogError(f"{path}, line {number}: {type(data).__name__} is not allowed; expected an object")
    return data


def _parse_header(data: dict[str, Any], path: Path, config_type: type[ConfigT]) -> Header[ConfigT]:
    where = f"{path}, line 1"
    if data.get("schema") != SCHEMA_VERSION:
        raise FlightLogError(f"{where}: field schema = {data.get('schema')!r} is not allowed; expected {SCHEMA_VERSION}")
    try:
        segment = decode(data.get("segment"), int, "segment")
        return Header(SCHEMA_VERSION, segment, decode(data.get("scheduler"), config_type, "scheduler"))
    except CodecError as error:
        raise FlightLogError(f"{where}: field {error.path}: {error.problem}") from None


def _parse_record(data: dict[str, Any], where: str) -> Record:
    missing = [name for name in ("now", "event", "commands") if name not in data]
    if missing:
        raise FlightLogError(f"{where}: field {missing[0]}: missing")
    try:
        return Record(
            decode(data["now"], float, "now"),
            decode(data["event"], Event, "event"),
            decode(data["commands"], tuple[Command, ...], "commands"),
        )
    except CodecError as error:
        raise FlightLogError(f"{where}: field {error.path}: {error.problem}") from None


def flight_log_runs(section: FlightLogSection) -> RunDirectory | None:
    """Where runs are recorded; None when they are not."""
    if not section.enabled:
        return None
    directory = section.directory or default_flight_log_directory()
    return RunDirectory(directory, section.segment_mib * 2**20, section.max_segments, section.keep_runs)


def default_flight_log_directory() -> Path:
    """$XDG_STATE_HOME/kv-conductor/flight, else ~/.local/state/kv-conductor/flight."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "kv-conductor" / "flight"
