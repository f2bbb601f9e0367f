"""Between a device pool, which keeps blocks by layer, and tiers, which keep a block as one row of bytes with all its layers.

A row is copied once each way. What goes down is copied under a pin that ends with the copy; what comes up is written straight
from the tier's own bytes, mapped or read, into blocks that are named group by group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from conductor.core.types import BlockHash
from workers.block_pool import BlockId, OutOfBlocks
from workers.device_cache import DeviceCache
from workers.kv_store.base import KVTier
from workers.kv_transfer.base import KVArray

RESTORE_GROUP_BYTES = 8 << 20  # verified and copied while it is still in the processor's cache


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore brought: `blocks` that were not in the device pool before."""

    blocks: int = 0
    nbytes: int = 0
    duration_s: float = 0.0


@contextmanager
def pool_rows(cache: DeviceCache, names: Sequence[BlockHash], first: int) -> Iterator[list[KVArray]]:
    """Copies of the blocks `names[first:]` that are cached without a gap, in all layers. They are pinned only while they are
    copied."""
    ids = cache.acquire(names)
    try:
        whole = ids[first : first + cache.whole(ids[first:])]
        rows = _packed(cache.read(whole)) if whole else []
    finally:
        cache.release(ids)
    yield rows


def _packed(layers: Sequence[KVArray]) -> list[KVArray]:
    blocks, layer_bytes = layers[0].shape
    rows = np.empty((blocks, len(layers), layer_bytes), dtype=np.uint8)
    for number, layer in enumerate(layers):
        rows[:, number] = layer
    return list(rows.reshape(blocks, -1))


def restore(cache: DeviceCache, tier: KVTier, names: Sequence[BlockHash]) -> Restored:
    """Bring what `tier` holds of a prefix into the device pool, group by group; what does not come is left to be computed."""
    began_s = time.perf_counter()
    reserved = cache.reserve(names, len(names), bare=tier.bare)
    if isinstance(reserved, OutOfBlocks):
        return Restored()
    table, held = reserved
    group = max(1, RESTORE_GROUP_BYTES // cache.kv.block_bytes)
    done = held
    tier.expect(names[held:])
    try:
        while done < len(names):
            wanted = names[done : done + group]
            with tier.read(wanted) as rows:
                _write(cache, table[done : done + len(rows)], rows)
                cache.commit(table, done, names[: done + len(rows)], bare=len(names) if tier.bare else 0)
                done += len(rows)
            if len(rows) < len(wanted):
                tier.changes.removed(names[done:])  # whoever claims them for the tier is wrong
                break
    finally:
        cache.release(table)
    return Restored(done - held, (done - held) * cache.kv.block_bytes, time.perf_counter() - began_s)


def _write(cache: DeviceCache, ids: Sequence[BlockId], rows: Sequence[KVArray]) -> None:
    """Block by block where the pool's memory is at hand, all at once where it is an accelerator's."""
    layers = cache.kv.num_layers
    if cache.rows:
        for block, row in zip(ids, rows, strict=True):
            cache.write([block], [layer[None] for layer in row.reshape(layers, -1)])
    elif rows:
        stacked = np.stack(rows).reshape(len(rows), layers, -1)
        cache.write(ids, [stacked[:, layer] for layer in range(layers)])
