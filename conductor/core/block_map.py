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
        return self.shard(block).get(block, 0)

    def shard(self, block: BlockHash) -> dict[BlockHash, int]:
        position = block & self.high
        return self.shards[position if position < len(self.shards) else position & self.low]

    def add(self, block: BlockHash, bit: int) -> bool:
        """Set a bit of a block's mask; False if it was set."""
        shard = self.shard(block)
        mask = shard.get(block, 0)
        if mask & bit:
            return False
        if mask:
            shard[block] = mask | bit
        else:
            shard[block] = bit
            self.count += 1
        return True

    def discard(self, block: BlockHash, bit: int) -> bool:
        """Clear a bit of a block's mask; False if it was clear."""
        shard = self.shard(block)
        mask = shard.get(block, 0)
        if not mask & bit:
            return False
        if mask == bit:
            del shard[block]
            self.count -= 1
        else:
            shard[block] = mask ^ bit
        return True

    def grow(self, kept: int) -> None:
        """Split as many shards as the content calls for. Bits outside `kept` are dropped on the way, so that a sweep of the
        shards that there were when it began misses nothing."""
        while self.count > self._fill * len(self.shards):
            self._split(kept)

    def sweep(self, position: int, kept: int) -> None:
        """Drop bits outside `kept` from one shard."""
        shard = self.shards[position]
        for block, mask in [(block, mask) for block, mask in shard.items() if mask & ~kept]:
            if mask & kept:
                shard[block] = mask & kept
            else:
                del shard[block]
                self.count -= 1

    def _split(self, kept: int) -> None:
        position = len(self.shards) - self.low - 1
        self.sweep(position, kept)
        shard, high = self.shards[position], self.high
        moved = {block: mask for block, mask in shard.items() if block & high != position}
        for block in moved:
            del shard[block]
        self.shards.append(moved)
        if len(self.shards) > high:
            self.low, self.high = high, 2 * high + 1
