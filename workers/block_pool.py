"""Which paged KV block holds which piece of which prefix, who uses it, and which one goes next.

Pure bookkeeping over block ids; the bytes lie in a `PagedKVCache`. A block is in one of three states:

    free        holds nothing                                        in the free list
    in use      ref_count > 0: a sequence or an offer reads it       never evicted (I3)
    cached      ref_count == 0, has a hash: kept for reuse           evicted least recently used first, leaves before roots

A block may be in use and have a hash at the same time. A block with cached children is never evicted before them, so
the pool stays closed: whoever finds a block finds all its ancestors. What became findable or was lost is handed out by
`drain_changes`, in order, for the shell to report.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sortedcontainers import SortedSet

from conductor.core.types import BlockHash, InvariantError

BlockId: TypeAlias = int
LastUse: TypeAlias = tuple[int, BlockId]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """`block` can be reused from here on; `parent` is None at the root of a prefix."""

    parent: BlockHash | None
    block: BlockHash


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block: BlockHash


PoolChange: TypeAlias = BlockStored | BlockRemoved


@dataclass(slots=True)
class _Block:
    ref_count: int = 0
    hash: BlockHash | None = None
    parent: BlockHash | None = None
    cached_children: int = 0
    last_use: int = 0


class BlockPool:
    """Paged blocks with reference counts and a prefix cache."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks!r}; it must be an integer of at least 1")
        self.num_blocks = num_blocks
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._evictable: SortedSet[LastUse] = SortedSet()  # unreferenced cached leaves, least recently used first
        self._unused_cached = 0
        self._clock = 0
        self._changes: list[PoolChange] = []

    @property
    def available(self) -> int:
        """How many blocks `allocate` could hand out: free ones and all that are cached without a reader."""
        return len(self._free) + self._unused_cached

    @property
    def cached(self) -> int:
        return len(self._by_hash)

    @property
    def referenced(self) -> int:
        return self.num_blocks - self.available

    def match(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """Ids of the longest cached prefix of `hashes`. They may be evicted by the next `allocate` unless pinned before it."""
        ids: list[BlockId] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            ids.append(block_id)
        return ids

    def pin(self, ids: Iterable[BlockId]) -> None:
        """Count one more reader of every block."""
        for block_id in ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                self._unused_cached -= 1
                self._evictable.discard((block.last_use, block_id))
            block.ref_count += 1

    def release(self, ids: Sequence[BlockId]) -> None:
        """Count one reader less. Blocks without a hash become free; the others stay cached, the deepest the first to go."""
        self._clock += 1
        for block_id in reversed(ids):
            block = self._blocks[block_id]
            if block.ref_count < 1:
                raise InvariantError(f"block {block_id} is released more often than pinned")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._retire(block_id, block)

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks with one reader each, or None, and then nothing has changed."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._evict()
        ids = [self._free.pop() for _ in range(count)]
        for block_id in ids:
            self._blocks[block_id].ref_count = 1
        return ids

    def commit(self, block_id: BlockId, block: BlockHash, parent: BlockHash | None) -> BlockId:
        """Make a full block findable; returns the id to read it by from here on.

        If the same content is already cached, the reader moves over to that copy and `block_id` is given back. So whoever
        reads a block reads the cached copies of all its ancestors, and an ancestor in use is never evicted.
        """
        cached_id = self._by_hash.get(block)
        if cached_id is not None:
            self.pin([cached_id])
            self.release([block_id])
            return cached_id
        slot = self._blocks[block_id]
        if slot.ref_count < 1 or slot.hash is not None:
            raise InvariantError(f"block {block_id} is committed without a reader or twice")
        slot.hash, slot.parent = block, parent
        self._by_hash[block] = block_id
        if parent is not None:
            self._adopt(self._by_hash[parent])
        self._changes.append(BlockStored(parent, block))
        return block_id

    def demote(self, hashes: Iterable[BlockHash]) -> None:
        """Make these blocks the first to be evicted, as far as nobody uses them."""
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None or self._blocks[block_id].ref_count:
                continue
            block = self._blocks[block_id]
            self._evictable.discard((block.last_use, block_id))
            block.last_use = 0
            if block.cached_children == 0:
                self._evictable.add((0, block_id))

    def clear(self) -> None:
        """Forget every cached block that nobody uses."""
        while self._evictable:
            self._evict()

    def hashes(self) -> list[tuple[BlockHash | None, BlockHash]]:
        """Every cached block as (parent, block), parents before children."""
        children: dict[BlockHash | None, list[BlockHash]] = {}
        for block_hash, block_id in self._by_hash.items():
            children.setdefault(self._blocks[block_id].parent, []).append(block_hash)
        ordered: list[tuple[BlockHash | None, BlockHash]] = []
        frontier: list[tuple[BlockHash | None, BlockHash]] = [(None, root) for root in children.get(None, ())]
        while frontier:
            ordered += frontier
            frontier = [(block, child) for _, block in frontier for child in children.get(block, ())]
        return ordered

    def drain_changes(self) -> list[PoolChange]:
        """What has become findable or was lost since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _retire(self, block_id: BlockId, block: _Block) -> None:
        if block.hash is None:
            self._free.append(block_id)
            return
        block.last_use = self._clock
        self._unused_cached += 1
        if block.cached_children == 0:
            self._evictable.add((block.last_use, block_id))

    def _adopt(self, parent_id: BlockId) -> None:
        parent = self._blocks[parent_id]
        parent.cached_children += 1
        self._evictable.discard((parent.last_use, parent_id))

    def _evict(self) -> None:
        _, block_id = self._evictable.pop(0)
        block = self._blocks[block_id]
        assert block.hash is not None
        del self._by_hash[block.hash]
        self._changes.append(BlockRemoved(block.hash))
        if block.parent is not None:
            parent_id = self._by_hash[block.parent]
            parent = self._blocks[parent_id]
            parent.cached_children -= 1
            if parent.cached_children == 0 and parent.ref_count == 0:
                self._evictable.add((parent.last_use, parent_id))
        self._blocks[block_id] = _Block()
        self._unused_cached -= 1
        self._free.append(block_id)

    def check(self) -> None:
        """Every invariant, in time proportional to the pool."""
        counts = [block.ref_count for block in self._blocks]
        if min(counts) < 0:
            raise InvariantError(f"I3: a reference count is negative: {min(counts)}")
        unused_cached = sum(block.ref_count == 0 and block.hash is not None for block in self._blocks)
        used = sum(count > 0 for count in counts)
        if len(self._free) + unused_cached + used != self.num_blocks or unused_cached != self._unused_cached:
            raise InvariantError(f"I2: {len(self._free)} free + {unused_cached} cached + {used} used != {self.num_blocks}")
        children: dict[BlockHash, int] = {}
        for block_hash, block_id in self._by_hash.items():
            block = self._blocks[block_id]
            if block.hash != block_hash:
                raise InvariantError(f"block {block_id} is filed under a hash that it does not have")
            if block.parent is not None:
                if block.parent not in self._by_hash:
                    raise InvariantError(f"I4: block {block_id} is cached without its parent")
                children[block.parent] = children.get(block.parent, 0) + 1
        leaves = {
            (self._blocks[block_id].last_use, block_id)
            for block_hash, block_id in self._by_hash.items()
            if block_hash not in children and self._blocks[block_id].ref_count == 0
        }
        if leaves != set(self._evictable):
            raise InvariantError("the eviction order does not list exactly the unreferenced cached leaves")
