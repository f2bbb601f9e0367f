"""The blocks that one worker's device pool holds: reference counts, least-recently-used order, leaves before roots.

A block is pinned while a request uses it. Unpinned blocks stay until their room is needed; the one unpinned longest ago goes
first. A request unpins its blocks from the last to the first, so a parent is always younger than its children and eviction
takes leaves first: the pool holds, with a block, all its ancestors. Room without identity (the partial last block of a
prompt, generated tokens, blocks on their way here) is counted, not named; so is room promised to a prompt that is being
computed, which still holds what may be evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence


class BlockCache:
    """Device pool of `capacity_blocks`. Methods that add blocks return what they had to evict, in order of eviction."""

    __slots__ = ("_idle", "_refs", "anonymous_blocks", "capacity_blocks", "promised_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.anonymous_blocks = 0
        self.promised_blocks = 0
        self._refs: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._refs)

    def __contains__(self, block: int) -> bool:
        return block in self._refs

    @property
    def pinned_blocks(self) -> int:
        return len(self._refs) - len(self._idle) + self.anonymous_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that a new request could get: empty ones and those that may be evicted."""
        return self.capacity_blocks - self.pinned_blocks - self.promised_blocks

    def contents(self) -> tuple[int, ...]:
        """Every held block, parents before children."""
        return tuple(self._refs)

    def match(self, blocks: Sequence[int]) -> int:
        """How many of `blocks`, from the first on, are held."""
        refs = self._refs
        matched = 0
        for block in blocks:
            if block not in refs:
                break
            matched += 1
        return matched

    def pin(self, blocks: Sequence[int]) -> None:
        """Keep held `blocks` until they are unpinned as often as they were pinned."""
        refs, idle = self._refs, self._idle
        for block in blocks:
            count = refs[block]
            if count == 0:
                del idle[block]
            refs[block] = count + 1

    def unpin(self, blocks: Sequence[int]) -> None:
        refs, idle = self._refs, self._idle
        for block in reversed(blocks):
            count = refs[block] - 1
            refs[block] = count
            if count == 0:
                idle[block] = None

    def store(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Add `blocks`, pinned. Returns those that were not held before, and those evicted for them."""
        refs, idle = self._refs, self._idle
        added = []
        for block in blocks:
            count = refs.get(block)
            if count is None:
                added.append(block)
                refs[block] = 1
                continue
            if count == 0:
                del idle[block]
            refs[block] = count + 1
        return added, self._evict()

    def take_anonymous(self, blocks: int) -> list[int]:
        """Occupy room without identity. Returns what was evicted for it."""
        self.anonymous_blocks += blocks
        return self._evict()

    def release_anonymous(self, blocks: int) -> None:
        self.anonymous_blocks -= blocks

    def demote(self, blocks: Sequence[int], parent_of: Mapping[int, int | None]) -> None:
        """Make those of `blocks` that are unpinned, with all that lies on top of them, the first to be evicted. O(held)."""
        parents = {parent_of[block] for block in self._refs}
        leaves_first = []
        for block in reversed(blocks):
            if block in self._idle and block not in parents:
                leaves_first.append(block)
                parents.discard(parent_of[block])
        for block in reversed(leaves_first):
            self._idle.move_to_end(block, last=False)

    def _evict(self) -> list[int]:
        refs, idle = self._refs, self._idle
        excess = len(refs) + self.anonymous_blocks - self.capacity_blocks
        if excess <= 0:
            return []
        evicted = []
        for _ in range(min(excess, len(idle))):
            block, _ = idle.popitem(last=False)
            del refs[block]
            evicted.append(block)
        return evicted
