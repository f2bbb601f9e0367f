"""Reading public trace formats: what comes out, and what every kind of damage leads to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.builders import PUBLISHED, mooncake_line, needs_published, write_lines
from traces.formats import lines as lines_module
from traces.formats import open_trace
from traces.schema import SkipReason, TraceError, TraceRequest


@pytest.mark.parametrize("compression", ["plain", "gzip", "zstd"])
def test_mooncake_times_are_milliseconds_and_blocks_512_tokens(tmp_path: Path, compression: str) -> None:
    """A Mooncake line becomes a request, however the file is compressed and whatever it is called."""
    path = write_lines(tmp_path / "trace", mooncake_line(1500, blocks=2, output=7, first_id=4), compression=compression)
    assert [TraceRequest(1.5, 1024, 7, (4, 5), 512)] == list(open_trace(path, strict=True))


def test_azure_times_count_from_the_first_request(tmp_path: Path) -> None:
    """Absolute times with seven digits of fraction, with and without an offset."""
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    path = write_lines(tmp_path / "a.csv", header, "2023-11-16 18:17:03.9799600,374,44", "2023-11-16 18:17:05.4799600,10,0")
    first, second = open_trace(path, strict=True)
    assert (first.timestamp_s, first.input_tokens, first.output_tokens, first.hash_ids) == (0.0, 374, 44, ())
    assert (second.input_tokens, second.output_tokens) == (10, 0)
    assert second.timestamp_s == pytest.approx(1.5)


def test_burstgpt_keeps_session_and_kind(tmp_path: Path) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path = write_lines(tmp_path / "b.csv", header, "5,s1,0.3,ChatGPT,472,18,490,Conversation log")
    [found] = open_trace(path, strict=True)
    assert TraceRequest(5.0, 472, 18, session="s1", traffic_class="Conversation log") == found


def test_bailian_names_chats_turns_and_16_token_blocks(tmp_path: Path) -> None:
    row = {"chat_id": 7, "parent_chat_id": 3, "timestamp": 0.25, "input_length": 20, "output_length": 2}
    path = write_lines(tmp_path / "q.jsonl", json.dumps(row | {"type": "text", "turn": 2, "hash_ids": [1, 2]}))
    [found] = open_trace(path, strict=True)
    assert TraceRequest(0.25, 20, 2, (1, 2), 16, session="7", parent="3", turn=2, traffic_class="text") == found


GOOD = mooncake_line(1000)
DAMAGE: dict[str, tuple[str | bytes, SkipReason]] = {
    "cut off": ('{"timestamp": 2000, "input_le', SkipReason.NOT_JSON),
    "not an object": ("[1, 2]", SkipReason.NOT_JSON),
    "nested without end": ("[" * 100_000, SkipReason.NOT_JSON),
    "not UTF-8": (b'{"timestamp": \xff}\n', SkipReason.NOT_UTF8),
    "field missing": ('{"timestamp": 2000, "input_length": 5, "hash_ids": [1]}', SkipReason.MISSING_FIELD),
    "negative time": (mooncake_line(-1), SkipReason.NEGATIVE_TIME),
    "NaN time": (mooncake_line(float("nan")), SkipReason.NOT_JSON),
    "time of a text": (mooncake_line().replace('"timestamp": 0', '"timestamp": "soon"'), SkipReason.BAD_VALUE),
    "going back": (mooncake_line(999), SkipReason.UNORDERED_TIME),
    "too few hashes": (mooncake_line(2000).replace("[0, 1]", "[0]"), SkipReason.HASH_COUNT),
    "hash of a text": (mooncake_line(2000).replace("[0, 1]", '[0, "x"]'), SkipReason.BAD_VALUE),
    "length of nothing": (mooncake_line(2000).replace("1024", "0"), SkipReason.BAD_VALUE),
    "length of a fraction": (mooncake_line(2000).replace("1024", "1024.5"), SkipReason.BAD_VALUE),
    "huge number": (mooncake_line(2000).replace("1024", "9" * 5000), SkipReason.NOT_JSON),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_row_is_counted_by_reason_and_the_rest_is_read(tmp_path: Path, kind: str) -> None:
    damaged, reason = DAMAGE[kind]
    trace = open_trace(write_lines(tmp_path / "t", GOOD, damaged, mooncake_line(3000)))
    assert [request.timestamp_s for request in trace] == [1.0, 3.0]
    assert {reason.value: 1} == trace.report.skipped


@pytest.mark.parametrize("kind", DAMAGE)
def test_strict_reading_stops_at_the_line_and_names_it(tmp_path: Path, kind: str) -> None:
    damaged, reason = DAMAGE[kind]
    path = write_lines(tmp_path / "t", GOOD, damaged)
    with pytest.raises(TraceError, match=f"{path}, line 2: .* is .*; allowed: ") as caught:
        list(open_trace(path, strict=True))
    assert reason is caught.value.fault.reason


def test_unknown_column_is_counted_or_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", mooncake_line()[:-1] + ', "colour": 1}')
    trace = open_trace(path)
    assert len(list(trace)) == 1
    assert trace.report.ignored_columns == {"colour": 1}
    with pytest.raises(TraceError, match="column is 'colour'"):
        list(open_trace(path, strict=True))


def test_csv_row_with_a_cell_too_many_is_counted(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    trace = open_trace(write_lines(tmp_path / "t", header, "2024-05-10 00:00:00,1,2,3", "2024-05-10 00:00:01,1,2"))
    assert len(list(trace)) == 1
    assert trace.report.skipped == {"column_count": 1}


def test_csv_header_without_a_needed_column_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", "TIMESTAMP,ContextTokens", "2024-05-10,1")
    with pytest.raises(TraceError, match="allowed: a header with the columns"):
        list(open_trace(path, format_name="azure"))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"hello\n", b"\x00\xff\x00"])
def test_file_of_no_format_is_refused(tmp_path: Path, content: bytes) -> None:
    path = write_lines(tmp_path / "t", content)
    with pytest.raises(TraceError, match="of no known format, or empty"):
        open_trace(path)


def test_empty_file_in_a_named_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="file is empty"):
        list(open_trace(write_lines(tmp_path / "t", b""), format_name="mooncake"))


def test_file_without_a_readable_row_tells_the_first_fault(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"2 rows skipped, first: .*line 1"):
        list(open_trace(write_lines(tmp_path / "t", mooncake_line(-1), mooncake_line(-2))))


def test_missing_file_and_unknown_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="not readable"):
        open_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="format is 'parquet'; allowed: mooncake, azure"):
        open_trace(write_lines(tmp_path / "t", GOOD), format_name="parquet")


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_compressed_file_cut_short_yields_what_came_before(tmp_path: Path, compression: str) -> None:
    """The rows before the break are read, the break is counted."""
    rows = [mooncake_line(number, first_id=number * number) for number in range(5_000)]
    path = write_lines(tmp_path / "t", *rows, compression=compression)
    path.write_bytes(path.read_bytes()[:-200])
    trace = open_trace(path)
    assert 0 < len(list(trace)) < 5_000
    assert 1 <= trace.report.skipped_rows <= 2


def test_line_without_an_end_costs_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line over the limit is skipped as one fault; the line behind it is read."""
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 1_000)
    exact = mooncake_line(1).ljust(999) + "\n"
    trace = open_trace(write_lines(tmp_path / "t", mooncake_line(0), "x" * 5_500, exact.encode(), mooncake_line(2)))
    assert [request.timestamp_s for request in trace] == [0.0, 0.001, 0.002]
    assert trace.report.skipped == {"line_too_long": 1}


def test_limit_stops_early_and_every_iteration_starts_anew(tmp_path: Path) -> None:
    trace = open_trace(write_lines(tmp_path / "t", *(mooncake_line(number) for number in range(9))), limit=4)
    assert [len(list(trace)), len(list(trace))] == [4, 4]
    assert trace.report.requests == 4


@settings(max_examples=150)
@given(st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([mooncake_line(n).encode() for n in range(4)])), max_size=12))
def test_whatever_is_in_a_file_it_is_read_counted_or_refused(rows: list[bytes]) -> None:
    """No content leads to anything but requests, counted skips or a TraceError."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_lines(Path(folder) / "t", b"\n".join(rows))
        for name in ("mooncake", "azure", "burstgpt", "bailian"):
            trace = open_trace(path, format_name=name)
            try:
                read = len(list(trace))
            except TraceError:
                continue
            assert read == trace.report.requests > 0


@settings(max_examples=60)
@given(st.integers(0, 200), st.integers(0, 255), st.sampled_from(["gzip", "zstd", "plain"]))
def test_a_wrong_byte_anywhere_never_ends_in_a_traceback(place: int, value: int, compression: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_lines(Path(folder) / "t", *(mooncake_line(number) for number in range(30)), compression=compression)
        raw = bytearray(path.read_bytes())
        raw[place % len(raw)] = value
        path.write_bytes(bytes(raw))
        try:
            read = len(list(open_trace(path)))
        except TraceError:
            read = 0
        assert read <= 30


@needs_published
def test_published_conversation_trace_reads_without_a_fault() -> None:
    assert PUBLISHED is not None
    trace = open_trace(PUBLISHED, strict=True)
    assert sum(1 for _ in trace) == 12_031


@pytest.mark.slow
def test_two_gigabytes_are_read_in_one_of_memory(tmp_path: Path) -> None:
    """A file larger than the memory there is: what is damaged in it is counted, what is whole is read."""
    path = tmp_path / "trace.jsonl"
    with path.open("wb") as file:
        file.write(mooncake_line(0, 2, 5, 0).encode() + b"\n")
        file.seek(2 << 30)  # a hole: a line of two gigabytes that is not JSON
        file.write(b"\n" + mooncake_line(1000, 2, 5, 8).encode() + b"\n")
    command = f"ulimit -v {1 << 20}; exec {sys.executable} -m conductor trace stats {path} --json -"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"] == 2
    assert "line_too_long" in done.stderr + done.stdout
