"""What lies in a store directory, told by the headers alone: for people who look at it while no worker has it open.

Nothing is written, locked or opened as a tier, and formats need not be known: a block's header says how long it is and what its
checksum must be. Works on directories of the disk tier and of the shared tier, and on what `quarantine/` keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conductor.core.types import BlockHash
from workers.kv_store.base import checksum
from workers.kv_store.blob_tier import QUARANTINE
from workers.kv_store.blob_tier import SUFFIX as BLOCK_SUFFIX
from workers.kv_store.files import Files
from workers.kv_store.pins import PIN_DIRECTORY
from workers.kv_store.records import HEADER_BYTES, Damage, decode_header
from workers.kv_store.segments import SUFFIX as SEGMENT_SUFFIX


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One record. `damage` says what is wrong with it, as far as was looked; `name` is None where no header is readable."""

    path: Path
    format: str
    name: BlockHash | None
    parent: BlockHash | None
    traffic_class: str
    stored_s: float
    nbytes: int
    pinned: bool
    damage: str | None


def stored_blocks(directory: Path, *, payloads: bool = False) -> Iterator[StoredBlock]:
    """Every record below a directory, in order of its files; with `payloads`, checksums are verified."""
    files = Files()
    roots = sorted(path for path in directory.rglob("*") if path.is_dir() and _is_fingerprint(path.name))
    pinned = {(root.name, pin.name) for root in roots for pin in (root / PIN_DIRECTORY).glob("*")}
    for root in roots:
        pins = {pin for fingerprint, pin in pinned if fingerprint == root.name}
        for path in sorted(root.rglob("*")):
            if path.suffix in (BLOCK_SUFFIX, SEGMENT_SUFFIX) and QUARANTINE not in path.relative_to(root).parts:
                yield from _records(path, root.name, pins, files, payloads=payloads)


def quarantined(directory: Path) -> int:
    """How many damaged blocks are kept for people to look at."""
    return sum(1 for path in directory.rglob(f"*{BLOCK_SUFFIX}") if QUARANTINE in path.parts)


def _records(path: Path, fingerprint: str, pins: set[str], files: Files, *, payloads: bool) -> Iterator[StoredBlock]:
    offset, size = 0, files.size(path) or 0
    while offset < size:
        header = decode_header(files.read(path, offset, HEADER_BYTES))
        if isinstance(header, Damage):
            yield StoredBlock(path, fingerprint, None, None, "", 0.0, size - offset, False, header.value)
            return
        end = offset + HEADER_BYTES + header.payload_bytes
        damage = "foreign format" if header.fingerprint.hex() != fingerprint else None
        if end > size:
            damage = "truncated"
        elif payloads and checksum(files.read(path, offset + HEADER_BYTES, header.payload_bytes)) != header.payload_checksum:
            damage = "checksum"
        yield StoredBlock(
            path,
            fingerprint,
            header.name,
            header.parent,
            header.traffic_class,
            header.stored_s,
            HEADER_BYTES + header.payload_bytes,
            f"{header.name:032x}" in pins,
            damage,
        )
        offset = end


def _is_fingerprint(name: str) -> bool:
    return len(name) == 32 and set(name) <= set("0123456789abcdef")
