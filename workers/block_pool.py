"""Who owns which block of a paged KV cache, which blocks are worth keeping, and which one goes first.

Pure planning: it hands out block ids and never touches their bytes, knows no clock and calls nobody. A block is *free*,
*pinned* (reference count above zero) or *idle* (unreferenced, but its content is named by a hash and may be found again).

- A hash chains its parent's, so it names a whole prefix. Only full blocks have one.
- Closure: a cached block's parent is cached too. Hence eviction takes leaves before roots, least recently used first.
- Whoever pins a block pins its ancestors, so every idle block can be evicted in the end: `available` is what can be had.
- A cached block may be *bare*: the state of its sliding-window layers has been left elsewhere. A prefix can be reused where its
  last `window_blocks` blocks, which are all that a later token sees in such layers, are not bare.

Changes of what is cached are kept as values, in order, until the shell drains and stamps them. Running out of blocks is a
value, `OutOfBlocks`, not an exception. All operations are O(1) a block, eviction O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from conductor.core.types import BlockHash, InvariantError

BlockId: TypeAlias = int
_HEAP_SLACK = 64


@dataclass(frozen=True, slots=True)
class OutOfBlocks:
    """`needed` blocks were asked for at once; `available` could be had."""

    needed: int
    available: int


@dataclass(frozen=True, slots=True)
class Stored:
    """`blocks` follow each other; `parent` is the hash before the first, None at the root."""

    parent: BlockHash | None
    blocks: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    blocks: tuple[BlockHash, ...]


PoolChange: TypeAlias = Stored | Removed


@dataclass(slots=True)
class _Cached:
    """A named block. `children` counts cached blocks that follow it; `last_used` is a tick of the pool."""

    id: BlockId
    parent: BlockHash | None
    bare: bool = False
    children: int = 0
    last_used: int = 0


@dataclass(slots=True)
class _Run:
    """A change under construction."""

    stored: bool
    parent: BlockHash | None
    blocks: list[BlockHash]

    def change(self) -> PoolChange:
        return Stored(self.parent, tuple(self.blocks)) if self.stored else Removed(tuple(self.blocks))


class BlockPool:
    """The blocks `0..num_blocks-1`. Ids with low numbers go first, so that a sequence's blocks tend to lie side by side."""

    def __init__(self, num_blocks: int, window_blocks: int = 0) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks!r}; it must be at least 1")
        self.num_blocks = num_blocks
        self._window_blocks = window_blocks
        self._free = list(range(num_blocks))  # a heap
        self._references = [0] * num_blocks
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._cached: dict[BlockHash, _Cached] = {}
        self._idle = 0
        self._leaves: list[tuple[int, BlockHash]] = []  # a heap of eviction candidates; stale entries are skipped
        self._tick = 0
        self._runs: list[_Run] = []

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def idle(self) -> int:
        return self._idle

    @property
    def pinned(self) -> int:
        return self.num_blocks - self.free - self.idle

    @property
    def available(self) -> int:
        """How many blocks `allocate` can give out."""
        return self.free + self.idle

    def depth(self, hashes: Sequence[BlockHash]) -> int:
        """The longest prefix of `hashes` that is cached, bare or not."""
        for depth, name in enumerate(hashes):
            if name not in self._cached:
                return depth
        return len(hashes)

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """The longest prefix of `hashes` that is cached and can be reused."""
        if not self._window_blocks:
            return self.depth(hashes)
        usable = whole = 0
        for depth, name in enumerate(hashes, 1):
            entry = self._cached.get(name)
            if entry is None:
                break
            whole = 0 if entry.bare else whole + 1
            if whole >= min(depth, self._window_blocks):
                usable = depth
        return usable

    def bare(self, name: BlockHash) -> BlockId | None:
        """The block that is cached under `name` if it is bare."""
        entry = self._cached.get(name)
        return entry.id if entry is not None and entry.bare else None

    def whole(self, ids: Sequence[BlockId]) -> int:
        """How many of these cached blocks, from the first, are not bare."""
        for depth, block in enumerate(ids):
            name = self._names[block]
            if name is None or self._cached[name].bare:
                return depth
        return len(ids)

    def cached(self) -> tuple[BlockHash, ...]:
        """Everything that is cached, each block after its parent."""
        children: dict[BlockHash | None, list[BlockHash]] = {}
        for name, entry in self._cached.items():
            children.setdefault(entry.parent, []).append(name)
        order = list(children.get(None, ()))
        for name in order:  # grows while it is walked
            order.extend(children.get(name, ()))
        return tuple(order)

    # --- pinning ------------------------------------------------------------------------------------------------------

    def acquire(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Pin the longest prefix of `hashes` that is cached and can be reused, and return its blocks."""
        return self.acquire_cached(hashes[: self.match(hashes)])

    def acquire_cached(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Pin a cached prefix, bare or not, and return its blocks."""
        ids = [self._cached[name].id for name in hashes]
        self.retain(ids)
        return ids

    def retain(self, ids: Iterable[BlockId]) -> None:
        """One more reference to each block. Callers pin ancestors along with a block."""
        for block in ids:
            if self._references[block] == 0:
                if self._names[block] is None:
                    raise InvariantError(f"I3: block {block} is free and cannot be pinned")
                self._idle -= 1
            self._references[block] += 1

    def release(self, ids: Sequence[BlockId]) -> None:
        """One reference less to each block. Named blocks become idle, others free."""
        self._tick += 1
        for block in ids:
            if self._references[block] < 1:
                raise InvariantError(f"I3: block {block} is released more often than pinned")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._put_down(block)

    # --- filling ------------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[BlockId] | OutOfBlocks:
        """`count` pinned blocks without a name, or none at all. Evicts idle blocks as needed."""
        if count > self.available:
            return OutOfBlocks(count, self.available)
        while len(self._free) < count:
            self._evict_one()
        ids = [heapq.heappop(self._free) for _ in range(count)]
        for block in ids:
            self._references[block] = 1
        return ids

    def commit(self, block: BlockId, name: BlockHash, parent: BlockHash | None, *, bare: bool = False) -> BlockId:
        """Name a full, pinned block, whose parent must be cached and pinned. Returns the block to use from here on.

        If the name is cached already, that block is pinned in place of the given one, which is released.
        """
        if self._references[block] < 1 or self._names[block] is not None:
            raise InvariantError(f"I3: block {block} is not a pinned block without a name")
        known = self._cached.get(name)
        if known is not None:
            self.retain((known.id,))
            self.release((block,))
            return known.id
        if parent is not None:
            above = self._cached.get(parent)
            if above is None or not self._references[above.id]:
                raise InvariantError(f"closure: parent {parent:#x} of block {block} is not cached and pinned")
            above.children += 1
        self._names[block] = name
        self._cached[name] = _Cached(block, parent, bare)
        self._note_stored(name, parent)
        return block

    def mend(self, name: BlockHash) -> None:
        """The window state of a bare block is there again."""
        self._cached[name].bare = False

    # --- forgetting ---------------------------------------------------------------------------------------------------

    def demote(self, hashes: Iterable[BlockHash]) -> None:
        """Make these the first to be evicted, inner ones after what follows them. Pinned and unknown ones are left alone."""
        for name in hashes:
            entry = self._cached.get(name)
            if entry is not None and not self._references[entry.id]:
                entry.last_used = 0
                self._offer_leaf(name, entry)

    def evict_idle(self) -> int:
        """Forget every idle block; returns how many."""
        count = self._idle
        for _ in range(count):
            self._evict_one()
        return count

    def drain_changes(self) -> list[PoolChange]:
        """What was stored and removed since the last call, in order."""
        runs, self._runs = self._runs, []
        return [run.change() for run in runs]

    def check(self) -> None:
        """I2, I3 and closure. O(blocks)."""
        if min(self._references) < 0:
            raise InvariantError("I3: a reference count is negative")
        idle = sum(self._references[entry.id] == 0 for entry in self._cached.values())
        pinned = sum(count > 0 for count in self._references)
        if idle != self._idle or self.free + idle + pinned != self.num_blocks:
            raise InvariantError(f"I2: {self.free} free + {idle} idle + {pinned} pinned of {self.num_blocks}")
        if any(self._references[block] or self._names[block] is not None for block in self._free):
            raise InvariantError("I2: a free block is pinned or named")
        children: dict[BlockHash, int] = {}
        for name, entry in self._cached.items():
            if self._names[entry.id] != name:
                raise InvariantError(f"block {entry.id} does not carry the name it is cached under")
            if entry.parent is None:
                continue
            parent = self._cached.get(entry.parent)
            if parent is None:
                raise InvariantError(f"closure: block {entry.id} is cached without its parent")
            if self._references[entry.id] and not self._references[parent.id]:
                raise InvariantError(f"closure: block {entry.id} is pinned without its parent")
            children[entry.parent] = children.get(entry.parent, 0) + 1
        if any(entry.children != children.get(name, 0) for name, entry in self._cached.items()):
            raise InvariantError("closure: a count of children is wrong")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _put_down(self, block: BlockId) -> None:
        name = self._names[block]
        if name is None:
            heapq.heappush(self._free, block)
            return
        self._idle += 1
        entry = self._cached[name]
        entry.last_used = self._tick
        self._offer_leaf(name, entry)

    def _offer_leaf(self, name: BlockHash, entry: _Cached) -> None:
        if self._references[entry.id] or entry.children:
            return
        if len(self._leaves) > 2 * self.num_blocks + _HEAP_SLACK:
            self._leaves = [item for item in self._leaves if self._evictable(*item)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (entry.last_used, name))

    def _evictable(self, last_used: int, name: BlockHash) -> bool:
        entry = self._cached.get(name)
        return entry is not None and entry.last_used == last_used and not entry.children and not self._references[entry.id]

    def _evict_one(self) -> None:
        while True:
            item = heapq.heappop(self._leaves)
            if self._evictable(*item):
                break
        name = item[1]
        entry = self._cached.pop(name)
        self._names[entry.id] = None
        self._idle -= 1
        heapq.heappush(self._free, entry.id)
        self._note_removed(name)
        if entry.parent is not None:
            parent = self._cached[entry.parent]
            parent.children -= 1
            self._offer_leaf(entry.parent, parent)

    def _note_stored(self, name: BlockHash, parent: BlockHash | None) -> None:
        last = self._runs[-1] if self._runs else None
        if last is not None and last.stored and last.blocks[-1] == parent:
            last.blocks.append(name)
        else:
            self._runs.append(_Run(True, parent, [name]))

    def _note_removed(self, name: BlockHash) -> None:
        last = self._runs[-1] if self._runs else None
        if last is not None and not last.stored:
            last.blocks.append(name)
        else:
            self._runs.append(_Run(False, None, [name]))
