"""The flight log: what is written comes back the same, a run verifies, and a damaged file says where."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.codec import CodecError, decode, encode
from conductor.core.commands import Command, RequestSnapshot
from conductor.core.cost_profile import CostProfile
from conductor.core.events import Event, RequestArrived, RequestCancelled, Tick, WorkerJoined
from conductor.core.types import Decision, Request, Role, Tier, WorkerSpec
from conductor.flight_log import (
    FlightLogError,
    FlightLogWriter,
    RunDirectory,
    prune_runs,
    read,
    recording,
    segment_path,
    verify,
)

HASHES = st.integers(min_value=0, max_value=2**128 - 1)


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Every value of an annotated type, block hashes of full width included."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        return st.builds(annotation, **{f.name: values_of(hints[f.name]) for f in dataclasses.fields(annotation)})
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin in (dict, Mapping):
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    if args:
        return st.one_of([values_of(arg) for arg in args])
    if annotation is int:
        return HASHES | st.integers(min_value=-(2**70), max_value=2**70)
    if annotation is float:
        return st.floats(allow_nan=False)
    return st.from_type(annotation)


@dataclass(frozen=True, slots=True)
class EchoConfig:
    offset: int = 0


class EchoScheduler:
    """Answers every event with a command that depends on configuration, time and history."""

    def __init__(self, config: EchoConfig) -> None:
        self._count = config.offset

    def handle(self, event: Event, now: float) -> list[Command]:
        self._count += 1
        return [RequestSnapshot(f"{type(event).__name__}@{now!r}", self._count)]


def record_run(path: Path, events: list[Event], *, segment_bytes: int = 10**6, max_segments: int = 100) -> None:
    """What a live run writes: each event with the commands that it caused."""
    scheduler = EchoScheduler(EchoConfig())
    writer = FlightLogWriter(path, EchoConfig(), segment_bytes=segment_bytes, max_segments=max_segments)
    for number, event in enumerate(events):
        now = number / 3
        writer.append(now, event, scheduler.handle(event, now))
    writer.close()


@given(st.data())
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("union", [Event, Command, Decision], ids=["Event", "Command", "Decision"])
def test_every_value_survives_the_journey_through_json(union: Any, data: st.DataObject) -> None:
    """Any event, command or decision, written as strict JSON, decodes to an equal value."""
    for member in typing.get_args(union):
        value = data.draw(values_of(member))
        text = json.dumps(encode(value, union), allow_nan=False)
        assert decode(json.loads(text), union) == value


def test_block_hashes_are_hexadecimal_strings() -> None:
    """No integer in the log is beyond what every JSON reader keeps exactly."""
    request = Request("r", 128, (2**127 + 1, 5), 1)
    assert encode(RequestArrived(request), Event)["request"]["block_hashes"] == [hex(2**127 + 1), 5]


def test_a_run_verifies_against_the_same_scheduler(tmp_path: Path) -> None:
    """Replaying the events gives the identical commands."""
    path = tmp_path / "a.flight.jsonl"
    record_run(path, [Tick(), RequestCancelled("r"), Tick()])
    verification = verify(path, EchoConfig, EchoScheduler)
    assert (verification.records, verification.difference) == (3, None)


def test_verify_reports_the_first_difference(tmp_path: Path) -> None:
    """A scheduler that decides differently is found at the record where it first did."""
    path = tmp_path / "a.flight.jsonl"
    record_run(path, [Tick(), RequestCancelled("r"), Tick()])

    class Forgetful(EchoScheduler):
        def handle(self, event: Event, now: float) -> list[Command]:
            return [] if isinstance(event, RequestCancelled) else super().handle(event, now)

    verification = verify(path, EchoConfig, Forgetful)
    assert verification.difference is not None
    assert verification.difference.number == 2
    assert "record 2 at 0.3333333333333333: RequestCancelled" in str(verification.difference)


def test_a_rotated_run_reads_as_one(tmp_path: Path) -> None:
    """Segments follow each other without a seam."""
    path = tmp_path / "a.flight.jsonl"
    record_run(path, [Tick()] * 50, segment_bytes=500)
    assert segment_path(path, 3).exists()
    assert verify(path, EchoConfig, EchoScheduler).records == 50


def test_old_segments_are_deleted_and_the_rest_is_refused_for_replay(tmp_path: Path) -> None:
    """Disk use is bounded, and a log without its beginning is never verified as if it had one."""
    path = tmp_path / "a.flight.jsonl"
    record_run(path, [Tick()] * 50, segment_bytes=500, max_segments=2)
    rest = sorted(tmp_path.iterdir())
    assert len(rest) == 2
    with pytest.raises(FlightLogError, match="is not the beginning of a run"):
        verify(rest[0], EchoConfig, EchoScheduler)
    with pytest.raises(FlightLogError, match="cannot read"):
        verify(path, EchoConfig, EchoScheduler)


def test_old_runs_are_deleted_with_all_their_segments(tmp_path: Path) -> None:
    """The directory keeps the latest runs whole."""
    for name in ("20260101-1", "20260102-1", "20260103-1"):
        record_run(tmp_path / f"{name}.flight.jsonl", [Tick()] * 10, segment_bytes=500)
    (tmp_path / "notes.txt").write_text("not ours")
    prune_runs(tmp_path, keep=1)
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {"20260103-1", "notes"}
    assert verify(tmp_path / "20260103-1.flight.jsonl", EchoConfig, EchoScheduler).records == 10


def test_a_run_directory_names_runs_by_time_and_keeps_the_latest(tmp_path: Path) -> None:
    """What is kept includes the run that begins."""
    runs = RunDirectory(tmp_path, segment_bytes=10**6, max_segments=2, keep_runs=2)
    for name in ("20200101T000000Z-1", "20200102T000000Z-1"):
        record_run(tmp_path / f"{name}.flight.jsonl", [Tick()])
    runs.open_run(EchoConfig()).close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[0] == "20200102T000000Z-1.flight.jsonl"
    assert len(names) == 2


def test_an_existing_log_is_never_overwritten(tmp_path: Path) -> None:
    """A new run needs a new name."""
    path = tmp_path / "a.flight.jsonl"
    record_run(path, [Tick()])
    with pytest.raises(FileExistsError):
        record_run(path, [Tick()])


def test_a_file_that_is_no_flight_log_is_not_replaced_by_one(tmp_path: Path) -> None:
    """`recording` takes the place of an older log; a name of another kind is refused with the file still there."""
    notes = tmp_path / "notes.txt"
    notes.write_text("keep me")
    with (
        pytest.raises(ValueError, match=r"notes.txt is not allowed; expected a name that ends in .flight.jsonl"),
        recording(notes, EchoConfig()),
    ):
        pass
    assert notes.read_text() == "keep me"


def test_a_log_carries_specs_and_profiles(tmp_path: Path) -> None:
    """A joined worker's cost profile is in the log, infinite bandwidth included."""
    profile = CostProfile(0.1, 1e-3, 1e-9, 0.1, 0.01, 1e-6, kv_bytes_per_token=46080, block_tokens=64)
    joined = WorkerJoined(WorkerSpec("p0", Role.PREFILL, "n", profile, {Tier.DEVICE: 7}), epoch=1)
    path = tmp_path / "a.flight.jsonl"
    record_run(path, [joined])
    _, records = read(path, EchoConfig)
    event = next(records).event
    assert event == joined
    assert isinstance(event, WorkerJoined)
    assert math.isinf(event.worker.profile.transfer_bytes_per_s)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 3: not JSON"),
        ("[]", r"line 3: list is not allowed; expected an object"),
        ("\u00fc", r"line 3: bytes beyond ASCII are not allowed; expected JSON in ASCII"),
        ("[" * 100_000, r"line 3: not JSON \(nested too deeply\)"),
        ('{"now":1,"event":{"kind":"Tick"}}', r"line 3: field commands: missing"),
        (
            '{"now":1,"event":{"kind":"Tock"},"commands":[]}',
            r"line 3: field event.kind: 'Tock' is not allowed; expected one of",
        ),
        ('{"now":"1","event":{"kind":"Tick"},"commands":[]}', r"line 3: field now: '1' is not allowed; expected a number"),
        (
            '{"now":1,"event":{"kind":"RequestCancelled","request_id":"r","why":1},"commands":[]}',
            r"line 3: field event.why: RequestCancelled has no such field",
        ),
        (
            '{"now":1,"event":{"kind":"RequestCancelled"},"commands":[]}',
            r"line 3: field event.request_id: missing",
        ),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    """File, line and field of the first fault."""
    path = tmp_path / "a.flight.jsonl"
    record_run(path, [Tick()])
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(FlightLogError, match=message):
        verify(path, EchoConfig, EchoScheduler)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    """A log of another version is not guessed at."""
    path = tmp_path / "a.flight.jsonl"
    path.write_text('{"schema":99,"segment":0,"scheduler":{}}\n')
    with pytest.raises(FlightLogError, match=r"line 1: field schema = 99 is not allowed; expected 1"):
        read(path, EchoConfig)


def test_a_wrong_enum_value_lists_the_allowed_ones() -> None:
    """Decoding names the values that would have been right."""
    with pytest.raises(CodecError, match=r"value: 9 is not allowed; expected one of \[0, 1, 2, 3\]"):
        decode(9, Tier)
