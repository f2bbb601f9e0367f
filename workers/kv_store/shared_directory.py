"""The tier that every node sees: one file a block in one or several directories of any mount, or in buckets.

    PATH / format fingerprint / first two digits of the hash / the hash

A block's path is chosen by its hash, so several mounts share the load. There is no index and no lock: a block is there when its
file is, parents are written before what follows them, and a file appears in one step. Whoever finds the store too full evicts;
two who do so at once take the same blocks, leaves first. Last use is the file's time, written at most once an hour. A file that
does not verify is moved aside into `quarantine/`, for people to look at, and counts as missing.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from conductor.core.types import BlockHash, Tier
from workers.kv_store.base import BlockFormat, KVStoreError, KVTier, NewBlock, TierStats
from workers.kv_store.blobs import Blobs, open_blobs
from workers.kv_store.files import Files
from workers.kv_store.records import HEADER_BYTES, Damage, decode_header, encode_header, open_record, record_bytes
from workers.kv_store.retention import HeldBlock, RetentionPolicy, plan_eviction, with_descendants
from workers.kv_transfer.base import KVArray

logger = logging.getLogger(__name__)

SUFFIX = ".kv"
QUARANTINE = "quarantine"
PINS = "pins"
FANOUT = tuple(f"{number:02x}" for number in range(256))
TOUCH_EVERY_S = 3600.0
RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """`capacity_bytes` bounds the whole store; each writer looks how full it is once every `capacity / 64` that it wrote."""

    capacity_bytes: int
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)


class SharedDirectoryTier(KVTier):
    """Thread-safe; any number of processes and nodes. `paths` are directories or URLs, the same list for everybody."""

    tier = Tier.SHARED

    def __init__(
        self,
        paths: Sequence[str],
        block_format: BlockFormat,
        limits: SharedLimits,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(block_format)
        if not paths:
            raise KVStoreError("store.shared_paths is empty; name at least one directory or URL")
        self._clock, self._limits = clock, limits
        self._fingerprint, self._record_bytes = block_format.fingerprint, record_bytes(block_format)
        self._prefix = self._fingerprint.hex()
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._retry_at_s = 0.0
        if self.capacity_blocks < 1:
            raise KVStoreError(f"the shared capacity is {limits.capacity_bytes} bytes; one block needs {self._record_bytes}")
        self._stripes: list[Blobs] = [open_blobs(path, files or Files()) for path in paths]
        self._until_check = 0
        try:
            self._describe()
        except OSError as error:
            raise KVStoreError(f"the shared tier cannot be opened in {', '.join(paths)}: {error}") from error

    @property
    def capacity_blocks(self) -> int:
        return self._limits.capacity_bytes // self._record_bytes

    def _describe(self) -> None:
        """Say in every directory, for people, what its fingerprint stands for."""
        for blobs in self._stripes:
            if blobs.modified_s(f"{self._prefix}/format.json") is None:
                blobs.write(f"{self._prefix}/format.json", [self.format.to_json().encode()])

    # --- reading ------------------------------------------------------------------------------------------------------

    def match(self, blocks: Sequence[BlockHash]) -> int:
        """By bisection: the store is closed, so what is missing is missing from some block on."""
        return bisect_left(range(len(blocks)), 1, key=lambda at: int(not self._exists(blocks[at])))

    @contextmanager
    def read(self, blocks: Sequence[BlockHash]) -> Iterator[list[KVArray]]:
        rows: list[KVArray] = []
        for name in blocks:
            row = self._read(name)
            if row is None:
                break
            rows.append(row)
        self.counters.hits += len(rows)
        self.counters.misses += len(blocks) - len(rows)
        if len(rows) < len(blocks):
            self.changes.removed(blocks[len(rows) :])
        yield rows

    def _read(self, name: BlockHash) -> KVArray | None:
        path, blobs = self._path(name), self._stripe(name)
        try:
            data = blobs.read(path, 0, self._record_bytes + 1)
            if data is None:
                return None
            row = open_record(data, name, self._fingerprint, self.format.block_bytes)
            if isinstance(row, Damage):
                self._quarantine(name, data, row)
                return None
            self._touch(blobs, path)
        except OSError as error:
            logger.error("block %032x of the shared tier cannot be read: %s", name, error)
            return None
        return row

    def _touch(self, blobs: Blobs, path: str) -> None:
        now, last_s = self._clock(), blobs.modified_s(path)
        if last_s is not None and now - last_s > TOUCH_EVERY_S:
            blobs.touch(path, now)

    def _quarantine(self, name: BlockHash, data: KVArray, damage: Damage) -> None:
        self.counters.quarantined += 1
        logger.error("block %032x of the shared tier does not verify (%s) and will be computed again", name, damage)
        blobs = self._stripe(name)
        blobs.write(f"{self._prefix}/{QUARANTINE}/{name:032x}{SUFFIX}", [data])
        blobs.delete(self._path(name))

    # --- writing ------------------------------------------------------------------------------------------------------

    def put(self, blocks: Sequence[NewBlock]) -> int:
        with self._lock:
            if self._failure is not None and self._clock() < self._retry_at_s:
                return 0
            count = 0
            try:
                self._make_room(len(blocks))
                for block in blocks:
                    count += self._put(block)
                self._failure = None
            except OSError as error:
                self._failure = f"the shared store does not take KV: {error}"
                self._retry_at_s = self._clock() + RETRY_S
                logger.error("the shared tier takes nothing for %g s: %s", RETRY_S, error)
            return count

    def _put(self, block: NewBlock) -> bool:
        if self._exists(block.name) or (block.parent is not None and not self._exists(block.parent)):
            return False
        header = encode_header(block, self._fingerprint, self._clock())
        self._stripe(block.name).write(self._path(block.name), [header, block.data])
        self.changes.stored(block.name, block.parent)
        self.counters.stored += 1
        return True

    # --- reclaiming ---------------------------------------------------------------------------------------------------

    def _make_room(self, incoming: int) -> None:
        self._until_check -= incoming
        if self._until_check > 0:
            return
        used = len(self._names())
        count = self._limits.retention.to_evict(used, incoming, self.capacity_blocks)
        if count:
            going = plan_eviction(self._held(), count, self._limits.retention)
            self._delete(going)
            self.counters.evicted += len(going)
            used -= len(going)
        self._until_check = min(self.capacity_blocks // 64, self.capacity_blocks - used - incoming)

    def _held(self) -> list[HeldBlock]:
        """Everything that is stored, as its headers tell; files without a sound one go first."""
        pinned = self.pinned()
        held = []
        for name in self._names():
            data = self._stripe(name).read(self._path(name), 0, HEADER_BYTES)
            if data is None:
                continue
            header = decode_header(data)
            if isinstance(header, Damage):
                held.append(HeldBlock(name, None, 0.0, ""))
            else:
                used_s = self._stripe(name).modified_s(self._path(name)) or header.stored_s
                held.append(HeldBlock(name, header.parent, used_s, header.traffic_class, name in pinned))
        return held

    def _delete(self, names: Sequence[BlockHash]) -> None:
        for name in names:
            self._stripe(name).delete(self._path(name))
        self.changes.removed(names)

    def _names(self) -> list[BlockHash]:
        found = []
        for blobs in self._stripes:
            for directory in FANOUT:
                names = blobs.list(f"{self._prefix}/{directory}")
                found += [int(name.removesuffix(SUFFIX), 16) for name in names if name.endswith(SUFFIX)]
        return found

    # --- by hand --------------------------------------------------------------------------------------------------------

    def remove(self, blocks: Iterable[BlockHash]) -> int:
        held = self._held()
        pinned = {block.name for block in held if block.pinned}
        going = with_descendants(((block.name, block.parent) for block in held), blocks)
        parents = {block.name: block.parent for block in held}
        kept: set[BlockHash | None] = set()
        for name in going:
            if name in pinned or name in kept:
                kept |= {name, parents[name]}
        gone = [name for name in going if name not in kept]
        self._delete(gone)
        return len(gone)

    def pinned(self) -> set[BlockHash]:
        names = self._stripes[0].list(f"{self._prefix}/{PINS}")
        return {int(name, 16) for name in names}

    def pin(self, blocks: Sequence[BlockHash]) -> int:
        depth = self.match(blocks)
        for name in blocks[:depth]:
            self._stripes[0].write(f"{self._prefix}/{PINS}/{name:032x}", [b"pinned"])
        return depth

    def unpin(self, blocks: Sequence[BlockHash]) -> None:
        for name in blocks:
            self._stripes[0].delete(f"{self._prefix}/{PINS}/{name:032x}")

    def snapshot(self) -> tuple[BlockHash, ...]:
        self.changes.drain()
        try:
            return tuple(self._names())
        except OSError as error:
            logger.error("the shared tier cannot be listed: %s", error)
            return ()

    def stats(self) -> TierStats:
        blocks, count = len(self._names()), self.counters
        return TierStats(
            tier=self.tier,
            blocks=blocks,
            capacity_blocks=self.capacity_blocks,
            used_bytes=blocks * self._record_bytes,
            stored=count.stored,
            evicted=count.evicted,
            hits=count.hits,
            misses=count.misses,
            quarantined=count.quarantined,
            pinned=len(self.pinned()),
            failure=self._failure,
        )

    def close(self) -> None:
        return None

    # --- paths ----------------------------------------------------------------------------------------------------------

    def _stripe(self, name: BlockHash) -> Blobs:
        return self._stripes[name % len(self._stripes)]

    def _path(self, name: BlockHash) -> str:
        digits = f"{name:032x}"
        return f"{self._prefix}/{digits[:2]}/{digits}{SUFFIX}"

    def _exists(self, name: BlockHash) -> bool:
        try:
            return self._stripe(name).modified_s(self._path(name)) is not None
        except OSError:
            return False
