"""Which block lies where in the segments of a disk tier: closed, in an order in which parents come first.

Filled by what this writer publishes and by reading the headers of what is on disk. Blocks in segments of other writers can be
read and forgotten here, but their space is not this writer's. For one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conductor.core.types import BlockHash
from workers.kv_store.files import Files
from workers.kv_store.retention import HeldBlock, with_descendants
from workers.kv_store.segments import Found, Segment, scan, segment_paths


@dataclass(slots=True)
class Where:
    segment: Segment
    offset: int
    parent: BlockHash | None
    traffic_class: str
    last_used_s: float


class SegmentIndex:
    def __init__(self, fingerprint: bytes, record_bytes: int, files: Files) -> None:
        self._fingerprint, self._record_bytes, self._files = fingerprint, record_bytes, files
        self._blocks: dict[BlockHash, Where] = {}
        self.segments: dict[Path, Segment] = {}
        self.foreign = 0

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._blocks)

    def get(self, name: BlockHash) -> Where | None:
        return self._blocks.get(name)

    @property
    def own_live(self) -> int:
        return sum(segment.live for segment in self.segments.values() if segment.own)

    def depth(self, blocks: Sequence[BlockHash]) -> int:
        return next((depth for depth, name in enumerate(blocks) if name not in self._blocks), len(blocks))

    def runs(self, blocks: Sequence[BlockHash]) -> list[tuple[Segment, int, int]]:
        """(segment, offset, count) of the held prefix of `blocks`; those that lie side by side together."""
        runs: list[tuple[Segment, int, int]] = []
        for name in blocks[: self.depth(blocks)]:
            where = self._blocks[name]
            if runs:
                segment, offset, count = runs[-1]
                if segment is where.segment and offset + count * self._record_bytes == where.offset:
                    runs[-1] = (segment, offset, count + 1)
                    continue
            runs.append((where.segment, where.offset, 1))
        return runs

    def inside(self, segment: Segment) -> list[BlockHash]:
        return [name for name, where in self._blocks.items() if where.segment is segment]

    def held(self, pinned: Iterable[BlockHash]) -> list[HeldBlock]:
        kept = set(pinned)
        return [
            HeldBlock(name, where.parent, where.last_used_s, where.traffic_class, name in kept)
            for name, where in self._blocks.items()
        ]

    def following(self, names: Iterable[BlockHash]) -> list[BlockHash]:
        """Held blocks among `names` and all that follow them, leaves first."""
        return with_descendants(((name, where.parent) for name, where in self._blocks.items()), names)

    def touch(self, blocks: Iterable[BlockHash], now_s: float) -> None:
        for name in blocks:
            where = self._blocks.get(name)
            if where is not None:
                where.last_used_s = now_s

    def publish(self, name: BlockHash, where: Where) -> bool:
        """A record is complete at the end of its segment; whether its block is new."""
        known = self._blocks.get(name)
        if known is not None:
            known.segment.live -= 1
        self._blocks[name] = where
        where.segment.scanned += self._record_bytes
        where.segment.records += 1
        where.segment.live += 1
        return known is None

    def forget(self, names: Iterable[BlockHash]) -> None:
        for name in names:
            self._blocks.pop(name).segment.live -= 1

    # --- what is on disk ------------------------------------------------------------------------------------------------

    def refresh(self, root: Path, own: Path, *, starting: bool) -> tuple[bool, list[BlockHash]]:
        """Take up what others have appended, at the start what this writer has left, and drop what is gone; whether blocks
        came, and which went."""
        directories = [root / name for name in self._files.list_dir(root) if name.isdigit()]
        paths = [path for directory in directories for path in segment_paths(directory, self._files)]
        found = False
        for path in paths:
            segment = self.segments.setdefault(path, Segment(path, path.parent == own))
            if starting or not segment.own:
                for record in scan(segment, self._files, self._record_bytes):
                    found |= self._take_up(segment, record)
        gone = []
        for path in self.segments.keys() - set(paths):
            lost = self.following(self.inside(self.segments.pop(path)))
            self.forget(lost)
            gone += lost
        return found, gone

    def _take_up(self, segment: Segment, record: Found) -> bool:
        header = record.header
        if header.fingerprint != self._fingerprint:
            self.foreign += 1
            return False
        known = self._blocks.get(header.name)
        if known is not None and not (known.segment.own and segment.own):
            return False
        if header.parent is not None and header.parent not in self._blocks:
            return False
        if known is not None:  # of this writer's own records the later one stands: it replaced one that did not verify
            known.segment.live -= 1
        self._blocks[header.name] = Where(segment, record.offset, header.parent, header.traffic_class, header.stored_s)
        segment.live += 1
        return known is None
