"""How many prefill workers held each block, looked at every 30 seconds, as figure 11 of the Mooncake paper (FAST'25) does.

Blocks are ranked by their holders summed over all looks, so that a block counts for how widely and how long it was spread.
What a ranked block did over time is answered for a few ranks alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from traces.sim.cache import BlockCache

LOOK_EVERY_S = 30.0


class ReplicaLog:
    """Blocks and their number of holders, look by look."""

    def __init__(self) -> None:
        self._due_s = LOOK_EVERY_S
        self._looks: list[tuple[NDArray[np.uint64], NDArray[np.intp]]] = []

    def look(self, now: float, pools: Iterable[BlockCache]) -> None:
        """Count holders, if it is time."""
        if now >= self._due_s:
            self._due_s += LOOK_EVERY_S
            self.count(pools)

    def count(self, pools: Iterable[BlockCache]) -> None:
        held = [np.array(pool.contents(), dtype=np.uint64) for pool in pools]
        self._looks.append(np.unique(np.concatenate(held), return_counts=True))

    def holders(self, ranks: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Holders at each look of the block at each of `ranks`, of those that there are."""
        if not self._looks:
            return {}
        blocks, places = np.unique(np.concatenate([found for found, _ in self._looks]), return_inverse=True)
        summed = np.bincount(places, weights=np.concatenate([counts for _, counts in self._looks]))
        order = np.argsort(-summed, kind="stable")
        return {rank: self._series(blocks[order[rank - 1]]) for rank in ranks if rank <= len(order)}

    def _series(self, block: np.uint64) -> tuple[int, ...]:
        return tuple(int(counts[found == block].sum()) for found, counts in self._looks)
