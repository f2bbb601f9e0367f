"""A map from block hash to a bitmask of holders that grows without a pause: linear hashing over plain dicts.

One dict of ten million entries stops the world for half a second whenever it grows. Here the map is a list of dicts of a few
thousand entries each; whenever it holds more than `FILL` a dict on average, one dict, the next in turn, is split in two, which
takes a fraction of a millisecond. A dict is split before it would have to grow, and no earlier, because few large dicts are
kinder to the processor's caches than many small ones. Keys and values are plain integers, which the garbage collector does
not visit.

The dict of a hash is `shards[i]` with `i = hash & high`, or `hash & low` where shard `i` does not exist yet; `low + 1` is the
number of shards at the start of the current round of splits and `high = 2 * low + 1`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from conductor.core.types import BlockHash

FILL = 1900  # with it a dict has 1,270 to 2,550 entries, and CPython's grow at 1,365 and 2,730


class BlockMap:
    """`shards`, `low` and `high` are for the loops that cannot afford a call for every block; all else goes by method."""

    def __init__(self, fill: int = FILL) -> None:
        self.shards: list[dict[BlockHash, int]] = [{}]
        self.low = 0
        self.high = 1
        self.count = 0
        self._fill = fill

    def get(self, block: BlockHash) -> int:
        """The bitmask of a block; 0 when nobody has it."""
        position = block & self.high
        shards = self.shards
        return shards[position if position < len(shards) else position & self.low].get(block, 0)

    def shard(self, block: BlockHash) -> dict[BlockHash, int]:
        position = block & self.high
        return self.shards[position if position < len(self.shards) else position & self.low]

    def add(self, blocks: Sequence[BlockHash], bit: int, kept: int) -> int:
        """Set a bit in the masks of `blocks`; how many lacked it. Bits outside `kept` may be dropped on the way."""
        added = 0
        for start in range(0, len(blocks), self._fill):
            added += self._add(blocks[start : start + self._fill], bit)
            while self.count > self._fill * len(self.shards):
                self._split(kept)
        return added

    def discard(self, blocks: Iterable[BlockHash], bit: int) -> int:
        """Clear a bit in the masks of `blocks`; how many had it."""
        discarded = 0
        for block in blocks:
            shard = self.shard(block)
            mask = shard.get(block, 0)
            if mask & bit:
                discarded += 1
                if mask == bit:
                    del shard[block]
                    self.count -= 1
                else:
                    shard[block] = mask ^ bit
        return discarded

    def sweep(self, position: int, kept: int) -> None:
        """Drop bits outside `kept` from one shard."""
        shard = self.shards[position]
        for block, mask in [(block, mask) for block, mask in shard.items() if mask & ~kept]:
            if mask & kept:
                shard[block] = mask & kept
            else:
                del shard[block]
                self.count -= 1

    def _add(self, blocks: Sequence[BlockHash], bit: int) -> int:
        shards, high, low = self.shards, self.high, self.low
        added, num_shards = 0, len(shards)
        for block in blocks:
            position = block & high
            shard = shards[position if position < num_shards else position & low]
            mask = shard.get(block, 0)
            if not mask:
                shard[block] = bit
                self.count += 1
                added += 1
            elif not mask & bit:
                shard[block] = mask | bit
                added += 1
        return added

    def _split(self, kept: int) -> None:
        """Split the next shard. Both halves are left without bits outside `kept`."""
        position = len(self.shards) - self.low - 1
        self.sweep(position, kept)
        shard, high = self.shards[position], self.high
        moved = {block: mask for block, mask in shard.items() if block & high != position}
        for block in moved:
            del shard[block]
        self.shards.append(moved)
        if len(self.shards) > high:
            self.low, self.high = high, 2 * high + 1
