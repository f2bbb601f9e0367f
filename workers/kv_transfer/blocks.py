"""KV in place: which rows of a cache's memory are offered, or are to be filled.

A transport reads the source's rows and writes the target's; nothing between the two needs the bytes in one piece. So both
sides name their memory (`rows`, one array a layer) and the blocks in it (`ids`), and whoever copies walks the runs of blocks
that lie side by side. Whether a memory must be staged first, as that of an accelerator, is settled by its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

KVArray: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
class KVBlocks:
    """Blocks `ids` of some layers: `rows[k]` is all memory of layer `first_layer + k`, [blocks, bytes of a block]."""

    rows: tuple[KVArray, ...]
    ids: tuple[int, ...]
    first_layer: int = 0

    @staticmethod
    def of(arrays: Sequence[KVArray], first_layer: int = 0) -> KVBlocks:
        """All blocks of some arrays, one a layer."""
        return KVBlocks(tuple(arrays), tuple(range(len(arrays[0]) if arrays else 0)), first_layer)

    @property
    def nbytes(self) -> int:
        return sum(len(self.ids) * rows.shape[1] for rows in self.rows)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of rows that lie side by side, in the order of `ids`."""
        ids = np.asarray(self.ids, dtype=np.int64)
        breaks = np.flatnonzero(np.diff(ids) != 1) + 1
        starts, stops = [0, *breaks.tolist()], [*breaks.tolist(), len(ids)]
        return tuple((self.ids[a], self.ids[a] + b - a) for a, b in zip(starts, stops, strict=True) if b > a)

    def views(self, layer: int) -> list[KVArray]:
        """The memory of the `layer`-th of these layers, a view for each run."""
        return [self.rows[layer][start:stop] for start, stop in self.runs]

    def part(self, first: int, stop: int | None = None) -> KVBlocks:
        """Blocks `first...` of these, in the same layers."""
        return KVBlocks(self.rows, self.ids[first:stop], self.first_layer)

    def layers(self, first: int, stop: int) -> KVBlocks:
        """The same blocks of layers `first..stop` of the cache."""
        chosen = self.rows[first - self.first_layer : stop - self.first_layer]
        return KVBlocks(chosen, self.ids, first)

    def fill(self, layer: int, data: KVArray, at: int = 0) -> None:
        """Write [blocks, bytes of a block] into the `layer`-th of these layers, from the `at`-th of these blocks on."""
        target = self if at == 0 and len(data) == len(self.ids) else self.part(at, at + len(data))
        done = 0
        for view in target.views(layer):
            np.copyto(view, data[done : done + len(view)])
            done += len(view)

    def copy(self) -> list[KVArray]:
        """The bytes, one array a layer."""
        return [np.concatenate(self.views(layer)) for layer in range(len(self.rows))]

    def checksums(self) -> tuple[int, ...]:
        """The XXH3 of each block's bytes, over these layers in order."""
        digests = [xxhash.xxh3_64() for _ in self.ids]
        for rows in self.rows:
            for block, digest in zip(self.ids, digests, strict=True):
                digest.update(rows[block].data)
        return tuple(digest.intdigest() for digest in digests)
