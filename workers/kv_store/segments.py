"""Append-only segment files of one writer: records one after the other, found again by reading their headers.

A segment is written by one process and read by any. What follows the first header that does not verify, or a record that the
file is too short for, is a torn tail: it is not read, and a writer that starts never appends to an old segment. Payloads are
verified when they are read, not when they are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workers.kv_store.files import Files
from workers.kv_store.records import HEADER_BYTES, Damage, Header, decode_header
from workers.kv_transfer.base import KVArray

SUFFIX = ".seg"


@dataclass(slots=True, eq=False)
class Segment:
    """`scanned` bytes have been understood; `live` of its records are in the index; an `own` one may be deleted here."""

    path: Path
    own: bool
    scanned: int = 0
    live: int = 0
    records: int = 0
    torn: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A record seen in a segment; its payload has not been verified."""

    header: Header
    offset: int


def segment_paths(directory: Path, files: Files) -> list[Path]:
    return [directory / name for name in files.list_dir(directory) if name.endswith(SUFFIX)]


def number_of(path: Path) -> int:
    return int(path.name.removesuffix(SUFFIX)) if path.name.removesuffix(SUFFIX).isdigit() else 0


def scan(segment: Segment, files: Files, record_bytes: int) -> Iterator[Found]:
    """Records that were not seen before, in the order in which they were written."""
    size = files.size(segment.path)
    while size is not None and not segment.torn and segment.scanned + record_bytes <= size:
        header = decode_header(files.read(segment.path, segment.scanned, HEADER_BYTES))
        if isinstance(header, Damage) or header.payload_bytes != record_bytes - HEADER_BYTES:
            segment.torn = True
            return
        offset = segment.scanned
        segment.scanned += record_bytes
        segment.records += 1
        yield Found(header, offset)


def read_records(segment: Segment, files: Files, offset: int, count: int, record_bytes: int) -> list[KVArray]:
    """`count` records that lie one after the other; those that the file is too short for come short."""
    data = files.read(segment.path, offset, count * record_bytes)
    return [data[start : start + record_bytes] for start in range(0, count * record_bytes, record_bytes)]
