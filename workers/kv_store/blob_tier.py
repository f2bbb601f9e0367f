"""What tiers have in common that keep one file a block: the directory itself is the index, so any number of processes share it.

    PATH / format fingerprint / directory of the block / the hash

A block is there when its file is, parents are written before what follows them, and a file appears in one step. Whoever finds
the store too full evicts by the retention plan, leaves first. Last use is the file's time, written once every `touch_every_s`.
A file that does not verify is moved aside into `quarantine/`, for people to look at, and counts as missing.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from conductor.core.types import BlockHash
from workers.block_pool import Removed, Stored
from workers.kv_store.base import BlockFormat, KVStoreError, KVTier, NewBlock, TierChange, TierStats
from workers.kv_store.blobs import Blobs
from workers.kv_store.records import HEADER_BYTES, Damage, decode_header, encode_header, open_record, record_bytes
from workers.kv_store.retention import HeldBlock, RetentionPolicy, plan_eviction, with_descendants
from workers.kv_transfer.base import KVArray

logger = logging.getLogger(__name__)

SUFFIX = ".kv"
QUARANTINE = "quarantine"
PINS = "pins"
RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class BlobLimits:
    """`capacity_bytes` bounds the whole store; each writer looks how full it is once every `slack_share` of that."""

    capacity_bytes: int
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    slack_share: float = 0.0
    touch_every_s: float = 0.0


class BlobTier(KVTier):
    """Thread-safe. A block lies in the stripe that its hash chooses, and there in one of `directories`."""

    directories: tuple[str, ...]

    def __init__(
        self,
        block_format: BlockFormat,
        stripes: Sequence[Blobs],
        limits: BlobLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(block_format)
        self._clock, self._limits, self._stripes = clock, limits, tuple(stripes)
        self._fingerprint, self._record_bytes = block_format.fingerprint, record_bytes(block_format)
        self._prefix = self._fingerprint.hex()
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._retry_at_s = 0.0
        self._room = 0  # blocks that may be written before the next look at how full the store is
        self._told: set[BlockHash] = set()  # what is held here as far as anybody was told
        self._used = 0  # as of that look, corrected by what was done here since
        if self.capacity_blocks < 1:
            found = f"the {self.tier.name.lower()} capacity is {limits.capacity_bytes} bytes"
            raise KVStoreError(f"{found}; one block needs {self._record_bytes}")

    @property
    def capacity_blocks(self) -> int:
        return self._limits.capacity_bytes // self._record_bytes

    def _describe(self) -> None:
        """Say in every stripe, for people, what its fingerprint stands for, and look at what is there."""
        for blobs in self._stripes:
            if blobs.modified_s(f"{self._prefix}/format.json") is None:
                blobs.write(f"{self._prefix}/format.json", [self.format.to_json().encode()])
        self._names()

    def _writing(self) -> AbstractContextManager[object]:
        """Held by whoever changes what is stored."""
        return self._lock

    # --- reading ------------------------------------------------------------------------------------------------------

    def match(self, blocks: Sequence[BlockHash]) -> int:
        """By bisection: the store is closed, so what is missing is missing from some block on."""
        return bisect_left(range(len(blocks)), 1, key=lambda at: int(not self._exists(blocks[at])))

    def expect(self, blocks: Sequence[BlockHash]) -> None:
        for name in blocks:
            self._stripe(name).expect(self._path(name))

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
        except OSError as error:
            logger.error("block %032x of the %s tier cannot be read: %s", name, self.tier.name.lower(), error)
            return None
        self._touch(name)
        return row

    def _touch(self, name: BlockHash) -> None:
        """Note that a block is in use. A store that is mounted read-only keeps no such times."""
        path, blobs, now = self._path(name), self._stripe(name), self._clock()
        try:
            last_s = blobs.modified_s(path)
            if last_s is not None and now - last_s > self._limits.touch_every_s:
                blobs.touch(path, now)
        except OSError as error:
            logger.debug("the use of block %032x cannot be noted: %s", name, error)

    def _quarantine(self, name: BlockHash, data: KVArray, damage: Damage) -> None:
        self.counters.quarantined += 1
        tier = self.tier.name.lower()
        logger.error("block %032x of the %s tier does not verify (%s) and will be computed again", name, tier, damage)
        self._stripe(name).write(f"{self._prefix}/{QUARANTINE}/{name:032x}{SUFFIX}", [data])
        self._stripe(name).delete(self._path(name))

    # --- writing ------------------------------------------------------------------------------------------------------

    def put(self, blocks: Sequence[NewBlock]) -> int:
        if self._failure is not None and self._clock() < self._retry_at_s:
            return 0
        count = 0
        try:
            with self._writing():
                self._touch_parents(blocks)
                missing = [block for block in blocks if not self._exists(block.name)]
                for block in missing[: self._make_room(len(missing))]:
                    count += self._put(block)
            self._failure = None
        except OSError as error:
            self._failure = f"the {self.tier.name.lower()} store does not take KV: {error}"
            self._retry_at_s = self._clock() + RETRY_S
            logger.error("the %s tier takes nothing for %g s: %s", self.tier.name.lower(), RETRY_S, error)
        return count

    def _touch_parents(self, blocks: Sequence[NewBlock]) -> None:
        """What is about to be continued is in use, and not to be evicted for its own continuation."""
        coming = {block.name for block in blocks}
        for block in blocks:
            if block.parent is not None and block.parent not in coming:
                self._touch(block.parent)

    def _put(self, block: NewBlock) -> bool:
        if self._exists(block.name) or (block.parent is not None and not self._exists(block.parent)):
            return False
        header = encode_header(block, self._fingerprint, self._clock())
        self._stripe(block.name).write(self._path(block.name), [header, block.data])
        self.changes.stored(block.name, block.parent)
        self.counters.stored += 1
        self._room -= 1
        self._used += 1
        return True

    # --- reclaiming ---------------------------------------------------------------------------------------------------

    def _make_room(self, incoming: int) -> int:
        """How many blocks may be written, after evicting if need be."""
        if self._room < incoming:
            used = len(self._names())
            count = self._limits.retention.to_evict(used, incoming, self.capacity_blocks)
            if count:
                going = plan_eviction(self.held(), count, self._limits.retention)
                self._delete(going)
                self.counters.evicted += len(going)
                used -= len(going)
            slack = int(self.capacity_blocks * self._limits.slack_share)
            self._room = min(max(incoming, slack), self.capacity_blocks - used)
        return max(0, self._room)

    def held(self) -> list[HeldBlock]:
        """As the headers tell; files without a sound one go first."""
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
        self._used -= len(names)
        self.changes.removed(names)

    def _names(self) -> list[BlockHash]:
        found = []
        for blobs in self._stripes:
            for directory in self.directories:
                names = blobs.list(f"{self._prefix}/{directory}")
                found += [int(name.removesuffix(SUFFIX), 16) for name in names if name.endswith(SUFFIX)]
        self._used = len(found)
        return found

    # --- by hand --------------------------------------------------------------------------------------------------------

    def remove(self, blocks: Iterable[BlockHash]) -> int:
        with self._writing():
            held = self.held()
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
        names = tuple(self._list())
        self._told = set(names)
        return names

    def drain_changes(self) -> list[TierChange]:
        changes = super().drain_changes()
        for change in changes:
            (self._told.update if isinstance(change, Stored) else self._told.difference_update)(change.blocks)
        return changes

    def look(self) -> list[TierChange]:
        """Others write here and evict from here, too."""
        changes, names = self.drain_changes(), set(self._list())
        gone, new = tuple(self._told - names), tuple(names - self._told)
        self._told = names
        return changes + ([Removed(gone)] if gone else []) + ([Stored(None, new)] if new else [])

    def _list(self) -> list[BlockHash]:
        """What can be seen to be held."""
        try:
            return self._names()
        except OSError as error:
            logger.error("the %s tier cannot be listed: %s", self.tier.name.lower(), error)
            return []

    def stats(self) -> TierStats:
        """`blocks` is as of the last look at the store, corrected by what was done here since."""
        count = self.counters
        return TierStats(
            tier=self.tier,
            blocks=self._used,
            capacity_blocks=self.capacity_blocks,
            used_bytes=self._used * self._record_bytes,
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
        return f"{self._prefix}/{self._directory_of(digits)}/{digits}{SUFFIX}"

    def _directory_of(self, digits: str) -> str:
        """One of `directories`."""
        return self.directories[int(digits[:2], 16) % len(self.directories)]

    def _exists(self, name: BlockHash) -> bool:
        try:
            return self._stripe(name).modified_s(self._path(name)) is not None
        except OSError:
            return False
