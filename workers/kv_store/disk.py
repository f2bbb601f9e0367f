"""The tier on a local SSD: each worker of the host appends to segment files of its own and reads those of all others.

    DIRECTORY / format fingerprint / writer number / segment files, a lock

A batch of blocks is one write and one fsync, after which its blocks are in the index; the index is rebuilt on start by reading
headers, and extended by what other writers have appended. Space comes back by whole segments: blocks are evicted by the
retention plan, a segment without live blocks is deleted, one with few has them copied on, and one with many gives them up.
A disk that does not take a write, because it is full, read-only or broken, is reported loudly, still read, and tried again
after a while; a file that is gone or damaged is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from conductor.core.types import BlockHash, Tier
from workers.kv_store.base import BlockFormat, KVStoreError, KVTier, NewBlock, TierStats
from workers.kv_store.files import Files, LockFile
from workers.kv_store.pins import Pins
from workers.kv_store.records import Damage, encode_header, open_record, record_bytes
from workers.kv_store.retention import HeldBlock, RetentionPolicy, plan_eviction
from workers.kv_store.segment_index import SegmentIndex, Where
from workers.kv_store.segments import SUFFIX, Segment, number_of, read_records, segment_paths
from workers.kv_transfer.base import KVArray

logger = logging.getLogger(__name__)

MAX_WRITERS = 256
RETRY_S = 30.0
FEW_LIVE = 0.5  # of a segment's records: up to there, copying them on costs less than computing them again


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """`capacity_bytes` bounds what this writer keeps; a segment is closed when it reaches `segment_bytes`."""

    capacity_bytes: int
    segment_bytes: int = 64 << 20
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)


class DiskTier(KVTier):
    """Thread-safe. One lock orders writers, another guards the index; none is held while blocks are read."""

    tier = Tier.DISK

    def __init__(
        self,
        directory: Path,
        block_format: BlockFormat,
        limits: DiskLimits,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(block_format)
        self._files, self._clock = files or Files(), clock
        self._fingerprint, self._record_bytes = block_format.fingerprint, record_bytes(block_format)
        self._root = directory / self._fingerprint.hex()
        self._limits = replace(
            limits, segment_bytes=max(self._record_bytes, min(limits.segment_bytes, limits.capacity_bytes // 8))
        )
        self._writing, self._lock = threading.Lock(), threading.RLock()
        self._index = SegmentIndex(self._fingerprint, self._record_bytes, self._files)
        self._current: Segment | None = None
        self._failure: str | None = None
        self._retry_at_s = 0.0
        if self.capacity_blocks < 1:
            raise KVStoreError(f"the disk capacity is {limits.capacity_bytes} bytes; one block needs {self._record_bytes}")
        try:
            self._directory, self._owner = self._claim_writer()
            self._pins = Pins(self._root, self._files)
            self._refresh(starting=True)
            self._make_room(0)  # evicted blocks whose segments were not deleted yet are found again
        except OSError as error:
            raise KVStoreError(f"the disk tier cannot be opened in {directory}: {error}") from error

    @property
    def capacity_blocks(self) -> int:
        return self._limits.capacity_bytes // self._record_bytes

    # --- reading ------------------------------------------------------------------------------------------------------

    def match(self, blocks: Sequence[BlockHash]) -> int:
        with self._lock:
            depth = self._index.depth(blocks)
            if depth < len(blocks) and self._refresh():
                depth = self._index.depth(blocks)
        return depth

    def expect(self, blocks: Sequence[BlockHash]) -> None:
        with self._lock:
            runs = self._index.runs(blocks)
        for segment, offset, count in runs:
            with suppress(OSError):
                self._files.will_need(segment.path, offset, count * self._record_bytes)

    @contextmanager
    def read(self, blocks: Sequence[BlockHash]) -> Iterator[list[KVArray]]:
        rows: list[KVArray] = []
        self.match(blocks)
        with self._lock:
            runs = self._index.runs(blocks)
        for segment, offset, count in runs:
            verified = self._read_run(blocks[len(rows) : len(rows) + count], segment, offset)
            rows += verified
            if len(verified) < count:
                break
        with self._lock:
            self._index.touch(blocks[: len(rows)], self._clock())
        self.counters.hits += len(rows)
        self.counters.misses += len(blocks) - len(rows)
        yield rows

    def _read_run(self, names: Sequence[BlockHash], segment: Segment, offset: int) -> list[KVArray]:
        """Verified rows of blocks that lie side by side; the first that does not verify ends them and is quarantined."""
        try:
            records = read_records(segment, self._files, offset, len(names), self._record_bytes)
        except OSError as error:
            self._quarantine(names[:1], str(error))
            return []
        rows: list[KVArray] = []
        for name, record in zip(names, records, strict=True):
            row = open_record(record, name, self._fingerprint, self.format.block_bytes)
            if isinstance(row, Damage):
                self._quarantine((name,), row.value)
                break
            rows.append(row)
        return rows

    def _quarantine(self, names: Sequence[BlockHash], reason: str) -> None:
        self.counters.quarantined += len(names)
        logger.error("block %032x of the disk tier cannot be used (%s) and will be computed again", names[0], reason)
        with self._lock:
            self._forget(self._index.following(names))

    # --- writing ------------------------------------------------------------------------------------------------------

    def put(self, blocks: Sequence[NewBlock]) -> int:
        with self._writing:
            if self._failure is not None and self._clock() < self._retry_at_s:
                return 0
            before = self.counters.stored
            try:
                self._make_room(len(self._accepted(blocks)))
                self._append(self._accepted(blocks)[: max(0, self.capacity_blocks - self._index.own_live)])
                self._reclaim()
                self._failure = None
            except OSError as error:
                self._failure = f"the disk does not take KV: {error}"
                self._retry_at_s = self._clock() + RETRY_S
                logger.error("the disk tier in %s takes nothing for %g s: %s", self._directory, RETRY_S, error)
            return self.counters.stored - before

    def _accepted(self, blocks: Sequence[NewBlock]) -> list[NewBlock]:
        """Blocks that are not held and whose parent is, or comes with them."""
        coming: dict[BlockHash, NewBlock] = {}
        with self._lock:
            for block in blocks:
                below = block.parent is None or block.parent in self._index or block.parent in coming
                if below and block.name not in self._index and block.name not in coming:
                    coming[block.name] = block
            self._index.touch([block.parent for block in blocks if block.parent is not None], self._clock())
        return list(coming.values())

    def _append(self, blocks: Sequence[NewBlock]) -> None:
        """Write, wait for the disk, publish: in this order, a segment at a time."""
        at = 0
        while at < len(blocks):
            segment = self._open_segment()
            batch = blocks[at : at + (self._limits.segment_bytes - segment.scanned) // self._record_bytes]
            now = self._clock()
            self._current = None  # what is left behind by a failure is never appended to
            self._files.append(
                segment.path, [part for block in batch for part in (encode_header(block, self._fingerprint, now), block.data)]
            )
            self._files.sync(segment.path)
            self._current = segment
            self._publish(segment, batch, now)
            at += len(batch)

    def _open_segment(self) -> Segment:
        current = self._current
        fits = current is not None and current.scanned + self._record_bytes <= self._limits.segment_bytes
        if current is not None and fits and self._files.size(current.path) == current.scanned:  # nobody has cut or deleted it
            return current
        self._files.make_dir(self._directory)
        last = max((number_of(path) for path in segment_paths(self._directory, self._files)), default=0)
        segment = Segment(self._directory / f"{last + 1:08d}{SUFFIX}", own=True)
        self._files.append(segment.path, [])
        self._files.sync(self._directory)
        with self._lock:
            self._index.segments[segment.path] = segment
        return segment

    def _publish(self, segment: Segment, blocks: Sequence[NewBlock], now: float) -> None:
        with self._lock:
            for block in blocks:
                where = Where(segment, segment.scanned, block.parent, block.traffic_class, now)
                if self._index.publish(block.name, where):
                    self.changes.stored(block.name, block.parent)
                    self.counters.stored += 1

    # --- reclaiming ---------------------------------------------------------------------------------------------------

    def _make_room(self, incoming: int) -> None:
        policy = self._limits.retention
        count = policy.to_evict(self._index.own_live, incoming, self.capacity_blocks)
        if not count:
            return
        self._pins.refresh()
        with self._lock:
            going = plan_eviction(self._index.held(self._pins), len(self._index), policy)
            own_before = self._index.own_live
            for name in going:
                if own_before - self._index.own_live >= count:
                    break
                self._forget([name])
                self.counters.evicted += 1

    def _reclaim(self) -> None:
        """Delete segments that are dead, and then, while the files take too much, those with the least alive."""
        own = [segment for segment in self._index.segments.values() if segment.own and segment is not self._current]
        for segment in sorted(own, key=lambda segment: segment.live / max(1, segment.records)):
            if segment.live and self._used_bytes() <= self._limits.capacity_bytes:
                return
            self._empty(segment)
            if not segment.live:
                self._files.unlink(segment.path)
                with self._lock:
                    self._index.segments.pop(segment.path, None)

    def _used_bytes(self) -> int:
        with self._lock:
            own = [path for path, segment in self._index.segments.items() if segment.own]
        return sum(self._files.size(path) or 0 for path in own)

    def _empty(self, segment: Segment) -> None:
        """Copy on, or give up, what is alive in a segment."""
        with self._lock:
            inside = self._index.inside(segment)
            if len(inside) > FEW_LIVE * segment.records:
                self.counters.evicted += len(self._spare_pinned(self._index.following(inside)))
                inside = self._index.inside(segment)
        for name in inside:
            where = self._index.get(name)
            rows = [] if where is None else self._read_run((name,), segment, where.offset)
            if where is not None and rows:
                self._append([NewBlock(name, where.parent, rows[0], where.traffic_class)])

    def _spare_pinned(self, names: Sequence[BlockHash]) -> list[BlockHash]:
        """Forget `names`, which come leaves first, except pinned ones and what leads to them; what is gone."""
        kept: set[BlockHash | None] = set()
        gone = []
        for name in names:
            where = self._index.get(name)
            if name in self._pins or name in kept:
                kept.add(None if where is None else where.parent)
            else:
                gone.append(name)
        self._forget(gone)
        return gone

    def _forget(self, names: Sequence[BlockHash]) -> None:
        self._index.forget(names)
        self.changes.removed(names)

    # --- by hand --------------------------------------------------------------------------------------------------------

    def remove(self, blocks: Iterable[BlockHash]) -> int:
        """Forgotten until the next start, when what is still in a segment is found again."""
        with self._writing, self._lock:
            return len(self._spare_pinned(self._index.following(blocks)))

    def pin(self, blocks: Sequence[BlockHash]) -> int:
        depth = self.match(blocks)
        self._pins.add(blocks[:depth])
        return depth

    def unpin(self, blocks: Sequence[BlockHash]) -> None:
        self._pins.discard(blocks)

    def snapshot(self) -> tuple[BlockHash, ...]:
        with self._lock:
            self.changes.drain()
            return tuple(self._index)

    def held(self) -> list[HeldBlock]:
        self._pins.refresh()
        with self._lock:
            return self._index.held(self._pins)

    def stats(self) -> TierStats:
        count, used = self.counters, self._used_bytes()
        with self._lock:
            return TierStats(
                tier=self.tier,
                blocks=len(self._index),
                capacity_blocks=self.capacity_blocks,
                used_bytes=used,
                stored=count.stored,
                evicted=count.evicted,
                hits=count.hits,
                misses=count.misses,
                quarantined=count.quarantined + self._index.foreign,
                pinned=len(self._pins),
                failure=self._failure,
            )

    def close(self) -> None:
        self._owner.close()

    # --- other writers ----------------------------------------------------------------------------------------------------

    def _claim_writer(self) -> tuple[Path, LockFile]:
        """The first writer number that no living process has; its segments are ours from here on."""
        for number in range(MAX_WRITERS):
            directory = self._root / f"{number:03d}"
            self._files.make_dir(directory)
            lock = LockFile(directory / "lock")
            if lock.acquire(wait=False):
                return directory, lock
            lock.close()
        raise KVStoreError(f"{self._root} has {MAX_WRITERS} living writers; no more are allowed")

    def _refresh(self, *, starting: bool = False) -> bool:
        with self._lock:
            found, gone = self._index.refresh(self._root, self._directory, starting=starting)
            self.changes.removed(gone)
        return found
