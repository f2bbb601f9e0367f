"""The contract of every tier off the device: keep blocks under their hash, give back held prefixes, tell what changed.

A tier holds blocks of one `BlockFormat`: one KV namespace and one layout. A block travels as a row of bytes, all layers one
after the other, and is kept with the hash of its parent, its traffic class, and a checksum. What does not verify on reading is
quarantined, counted, told as removed, and is a miss; a tier never serves it. A tier that cannot work any longer says why in
`stats().failure` and behaves as if it were empty: a cached prefix is an optimisation, never the truth.

    KVStoreError            a tier cannot be opened or used as asked; the message names what is wrong

`put`, `read` and `remove` block and may be called from several threads at once. Closure: a held block's parent is held too.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

import xxhash

from conductor.core.types import BlockHash, Tier
from workers.block_pool import Removed, Stored
from workers.kv_store.retention import HeldBlock
from workers.kv_transfer.base import KVArray, KVDescriptor

TierChange: TypeAlias = Stored | Removed
HASH_BYTES = 16


class KVStoreError(Exception):
    """A tier cannot be opened or used as asked."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What the bytes of a tier mean. `namespace` names model, weights, tokenizer, adapter; tenants differ in their hashes."""

    namespace: str
    kv: KVDescriptor

    @property
    def block_bytes(self) -> int:
        return self.kv.block_bytes

    def to_json(self) -> str:
        return json.dumps({"namespace": self.namespace, "kv": asdict(self.kv)}, sort_keys=True)

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever any part of the format does."""
        return xxhash.xxh3_128_digest(self.to_json().encode())


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block to be kept. `data` is one row of `format.block_bytes` bytes."""

    name: BlockHash
    parent: BlockHash | None
    data: KVArray
    traffic_class: str = "chat"


@dataclass(frozen=True, slots=True)
class TierStats:
    """Plain numbers of one tier. `failure` says why it serves nothing, or why it takes nothing more."""

    tier: Tier
    blocks: int
    capacity_blocks: int
    used_bytes: int
    stored: int
    evicted: int
    hits: int
    misses: int
    quarantined: int
    pinned: int
    failure: str | None = None


@dataclass(slots=True)
class Counters:
    """What has happened to a tier since it was opened, in blocks."""

    stored: int = 0
    evicted: int = 0
    hits: int = 0
    misses: int = 0
    quarantined: int = 0


class KVTier(ABC):
    """One place off the device that holds blocks. `bare`: without the state of their sliding-window layers."""

    tier: Tier
    bare: bool = False

    def __init__(self, block_format: BlockFormat) -> None:
        self.format = block_format
        self.counters = Counters()
        self.changes = ChangeLog()

    @property
    @abstractmethod
    def capacity_blocks(self) -> int: ...

    @abstractmethod
    def match(self, blocks: Sequence[BlockHash]) -> int:
        """How many of `blocks`, which follow each other from a root, are held without a gap. A hint: they may go."""

    @abstractmethod
    def put(self, blocks: Sequence[NewBlock]) -> int:
        """Keep blocks, parents before what follows them; how many were not held before. Those whose parent is not held, or for
        which there is no room, are left out. Never raises because of a disk: a tier that fails says so in its stats."""

    def expect(self, blocks: Sequence[BlockHash]) -> None:  # noqa: B027  a hint that a tier may do without
        """`blocks` are about to be read in this order: begin to bring them nearer. Returns at once, and never fails."""

    @abstractmethod
    def read(self, blocks: Sequence[BlockHash]) -> AbstractContextManager[list[KVArray]]:
        """The verified bytes of the longest held prefix of `blocks`, whose first need not be a root; valid, and not to be
        written, inside of the context."""

    @abstractmethod
    def remove(self, blocks: Iterable[BlockHash]) -> int:
        """Forget blocks with everything that follows them, except what is pinned; how many are gone."""

    @abstractmethod
    def pin(self, blocks: Sequence[BlockHash]) -> int:
        """Keep held blocks until they are unpinned; how many are held. Who pins a block pins its ancestors along with it."""

    @abstractmethod
    def unpin(self, blocks: Sequence[BlockHash]) -> None: ...

    @abstractmethod
    def snapshot(self) -> tuple[BlockHash, ...]:
        """Everything that is held; undrained changes are part of it and forgotten."""

    @abstractmethod
    def held(self) -> list[HeldBlock]:
        """Everything that is held with parent, last use, traffic class and pin, in no particular order."""

    @abstractmethod
    def stats(self) -> TierStats: ...

    @abstractmethod
    def close(self) -> None:
        """Let go of files and memory. Again changes nothing."""

    def look(self) -> list[TierChange]:
        """What is to be told of this tier: undrained changes, and then what others have changed since the last time. Blocks."""
        return self.drain_changes()

    def drain_changes(self) -> list[TierChange]:
        """What this process has stored, removed, or found missing since the last call, in order."""
        return self.changes.drain()


@dataclass(slots=True)
class ChangeLog:
    """Changes in order, runs of blocks together. Thread-safe."""

    _changes: list[TierChange] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stored(self, name: BlockHash, parent: BlockHash | None) -> None:
        with self._lock:
            last = self._changes[-1] if self._changes else None
            if isinstance(last, Stored) and last.blocks[-1] == parent:
                self._changes[-1] = Stored(last.parent, (*last.blocks, name))
            else:
                self._changes.append(Stored(parent, (name,)))

    def removed(self, names: Iterable[BlockHash]) -> None:
        gone = tuple(names)
        if gone:
            with self._lock:
                self._changes.append(Removed(gone))

    def drain(self) -> list[TierChange]:
        with self._lock:
            changes, self._changes = self._changes, []
        return changes


def checksum(data: KVArray) -> int:
    """XXH3 of a block's bytes."""
    return xxhash.xxh3_64_intdigest(data.data)
