"""Lines of a plain, gzip or zstd file, one at a time, however large the file and however damaged.

Compression is told by the file's first bytes, never by its name. A line longer than `MAX_LINE_BYTES` is not held: its rest
is read away and it comes out as a fault, so a file without a line break costs no more memory than a good one. A compressed
stream that breaks off yields what came before it, then a fault.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import zstandard

from traces.schema import Fault, SkipReason, TraceError

MAX_LINE_BYTES = 8 << 20
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
STREAM_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)


def file_fault(path: Path, reason: SkipReason, value: str, allowed: str) -> Fault:
    """A fault of the file as a whole."""
    return Fault(reason, str(path), None, "file", value, allowed)


@contextmanager
def open_binary(path: Path) -> Iterator[IO[bytes]]:
    """The decompressed bytes of `path`. Raises TraceError when it cannot be opened."""
    try:
        raw = path.open("rb")
    except OSError as error:
        fault = file_fault(path, SkipReason.UNREADABLE, f"not readable ({error.strerror})", "a file that can be read")
        raise TraceError(fault) from error
    with raw:
        yield _decompressed(raw)


def _decompressed(raw: io.BufferedReader) -> IO[bytes]:
    magic = raw.peek(4)[:4]
    if magic.startswith(GZIP_MAGIC):
        return cast(IO[bytes], gzip.open(raw, "rb"))
    if magic == ZSTD_MAGIC:
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(cast(io.RawIOBase, reader))
    return raw


def read_lines(path: Path) -> Iterator[tuple[int, str | Fault]]:
    """Number and text of every line that is not blank, or the fault in its place."""
    with open_binary(path) as stream:
        number = 0
        while True:
            number += 1
            try:
                raw = stream.readline(MAX_LINE_BYTES)
                fits = len(raw) < MAX_LINE_BYTES or raw.endswith(b"\n") or _skip_rest(stream)
            except STREAM_ERRORS as error:
                yield number, _line_fault(path, number, SkipReason.DAMAGED_STREAM, str(error), "an undamaged stream")
                return
            if not raw:
                return
            if not fits:
                allowed = f"at most {MAX_LINE_BYTES} bytes a line"
                yield number, _line_fault(path, number, SkipReason.LINE_TOO_LONG, "too long", allowed)
            elif raw.strip():
                yield number, _decode(path, number, raw)


def _skip_rest(stream: IO[bytes]) -> bool:
    """Read to the end of the line that has filled the limit. False: the line is longer than the limit."""
    rest_bytes = 0
    while True:
        piece = stream.readline(MAX_LINE_BYTES)
        rest_bytes += len(piece)
        if len(piece) < MAX_LINE_BYTES or piece.endswith(b"\n"):
            return rest_bytes == 0


def _decode(path: Path, number: int, raw: bytes) -> str | Fault:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        value = f"byte 0x{raw[error.start]:02x} at column {error.start + 1}"
        return _line_fault(path, number, SkipReason.NOT_UTF8, value, "UTF-8 text")


def _line_fault(path: Path, number: int, reason: SkipReason, value: str, allowed: str) -> Fault:
    return Fault(reason, str(path), number, "line", value, allowed)
