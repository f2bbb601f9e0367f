"""The device pool of one worker: the planning of `BlockPool`, the bytes of `PagedKVCache`, and a lock around the planning.

Compute and KV movement run in different threads. Planning is short and locked; bytes are read and written outside of the lock,
which is safe because a full, named block never changes, and a fresh block belongs to whoever allocated it. On the CPU blocks
that lie side by side are exported as views of the cache, without a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from conductor.core.types import BlockHash
from models.base import KVLayout, PagedKVCache
from models.host_copies import HostCopies
from workers.block_pool import BlockId, BlockPool, OutOfBlocks, PoolChange
from workers.kv_transfer.base import KVDescriptor
from workers.kv_transfer.blocks import KVArray, KVBlocks
from workers.needed_state import window_blocks

Fill: TypeAlias = Callable[[KVBlocks, int], None]
"""Fills blocks with what is wanted there, leaving out as many blocks at the front of that as the number says."""

FillIds: TypeAlias = Callable[[Sequence[BlockId], int], None]
"""The same, given the blocks by their ids."""


def describe_layout(layout: KVLayout, block_tokens: int) -> KVDescriptor:
    """What a transport needs to know of a cache's bytes."""
    return KVDescriptor(
        layout=layout.name,
        version=layout.version,
        dtype=str(layout.dtype).removeprefix("torch."),
        token_shape=tuple(layout.token_shape),
        num_layers=layout.num_layers,
        block_tokens=block_tokens,
        layer_block_bytes=layout.bytes_per_token // layout.num_layers * block_tokens,
    )


class DeviceCache:
    """Thread-safe. `on_freed` is called, in whatever thread, after blocks have been released. Only the bytes of the layers
    `held`, by default all, lie here; they keep their numbers."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, block_tokens: int, device: str = "cpu", held: range | None = None
    ) -> None:
        self.paged = PagedKVCache(layout, num_blocks, block_tokens, device, held)
        self.kv = describe_layout(layout, block_tokens)
        self.on_freed: Callable[[], None] = lambda: None
        self.window_blocks = window_blocks(layout, block_tokens)
        self._pool = BlockPool(num_blocks, self.window_blocks)
        self._lock = threading.Lock()
        self._copies = HostCopies(self.paged.layers[0].device)
        self._rows: list[KVArray] | None = [_rows(layer) for layer in self.paged.layers] if self._on_cpu else None

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def block_tokens(self) -> int:
        return self.paged.block_tokens

    @property
    def available(self) -> int:
        return self._pool.available

    @property
    def pinned(self) -> int:
        return self._pool.pinned

    @property
    def idle(self) -> int:
        return self._pool.idle

    @property
    def _on_cpu(self) -> bool:
        return self.paged.layers[0].device.type == "cpu"

    # --- planning -----------------------------------------------------------------------------------------------------

    def match(self, hashes: Sequence[BlockHash]) -> int:
        with self._lock:
            return self._pool.match(hashes)

    def acquire(self, hashes: Sequence[BlockHash], *, whole: bool = False) -> list[BlockId]:
        """Pin the longest prefix of `hashes` that can be reused; with `whole` no further than all of it has all layers."""
        with self._lock:
            ids = self._pool.acquire(hashes)
            kept = self._pool.whole(ids) if whole else len(ids)
            self._pool.release(ids[kept:])
            return ids[:kept]

    def acquire_bare(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Pin the longest prefix of `hashes` that is cached, bare or not."""
        with self._lock:
            return self._pool.acquire_cached(hashes[: self._pool.depth(hashes)])

    def reserve(
        self, hashes: Sequence[BlockHash], blocks: int, *, bare: bool = False
    ) -> tuple[list[BlockId], int] | OutOfBlocks:
        """`blocks` pinned blocks that begin with the longest prefix of `hashes` that can be reused, and its length; with `bare`
        the longest that is cached at all."""
        with self._lock:
            known = hashes[:blocks]
            held = self._pool.acquire_cached(known[: self._pool.depth(known)]) if bare else self._pool.acquire(known)
            fresh = self._pool.allocate(blocks - len(held))
            if isinstance(fresh, OutOfBlocks):
                self._pool.release(held)
                return fresh
            return held + fresh, len(held)

    def reserve_bare(
        self, hashes: Sequence[BlockHash], blocks: int, replayed: int
    ) -> tuple[list[BlockId], int, list[BlockId]] | None:
        """As `reserve`, with all that is cached of `hashes`, bare or not, and `replayed` spare blocks to compute its end again.
        None where that is no less than to compute what cannot be reused, or there is no room for it."""
        with self._lock:
            cached = self._pool.depth(hashes)
            if replayed >= cached - self._pool.match(hashes):
                return None
            held = self._pool.acquire_cached(hashes[:cached])
            fresh = self._pool.allocate(blocks - cached + replayed)
            if isinstance(fresh, OutOfBlocks):
                self._pool.release(held)
                return None
            return held + fresh[replayed:], cached, fresh[:replayed]

    def allocate(self, count: int) -> list[BlockId] | OutOfBlocks:
        with self._lock:
            return self._pool.allocate(count)

    def commit(self, table: list[BlockId], first: int, hashes: Sequence[BlockHash], bare: int = 0) -> None:
        """Name the full blocks `table[first:len(hashes)]` in place; earlier ones are named already. Those before `bare` have no
        window state; the others give theirs to equal ones that are cached without."""
        with self._lock:
            for position in range(first, len(hashes)):
                name, parent = hashes[position], hashes[position - 1] if position else None
                if position >= bare:
                    self._mend(name, table[position])
                table[position] = self._pool.commit(table[position], name, parent, bare=position < bare)

    def _mend(self, name: BlockHash, whole: BlockId) -> None:
        """Nobody reads what is written: nothing sees, offers or keeps the window state of a bare block."""
        bare = self._pool.bare(name)
        if bare is not None:
            for layer, kept in zip(self.paged.held, self.paged.layers, strict=True):
                if self.paged.layout.has_window(layer):
                    kept[bare].copy_(kept[whole])
            self._pool.mend(name)

    def copy(self, ids: Sequence[BlockId], into: Sequence[BlockId]) -> None:
        """Copy pinned blocks into blocks that belong to the caller."""
        self.paged.scatter(into, self.paged.gather(ids))

    def whole(self, ids: Sequence[BlockId]) -> int:
        """How many of these pinned blocks, from the first, have the state of all their layers."""
        with self._lock:
            return self._pool.whole(ids)

    def retain(self, ids: Sequence[BlockId]) -> None:
        with self._lock:
            self._pool.retain(ids)

    def release(self, ids: Sequence[BlockId]) -> None:
        with self._lock:
            self._pool.release(ids)
        self.on_freed()

    def demote(self, hashes: Sequence[BlockHash]) -> None:
        with self._lock:
            self._pool.demote(hashes)

    def evict_idle(self) -> int:
        with self._lock:
            return self._pool.evict_idle()

    def drain_changes(self) -> list[PoolChange]:
        with self._lock:
            return self._pool.drain_changes()

    def snapshot(self) -> tuple[BlockHash, ...]:
        """Everything cached, each block after its parent; undrained changes are part of it and forgotten."""
        with self._lock:
            self._pool.drain_changes()
            return self._pool.cached()

    def check(self) -> None:
        with self._lock:
            self._pool.check()

    # --- bytes --------------------------------------------------------------------------------------------------------

    def read(self, ids: Sequence[BlockId]) -> list[KVArray]:
        """The bytes of pinned blocks, one array a layer; valid while they stay pinned."""
        if self._rows is None:
            data = self._copies.to_host(self.paged.gather(ids))
            return [_rows(layer) for layer in data]
        where = _slice_or_index(ids)
        return [rows[where] for rows in self._rows]

    def write(self, ids: Sequence[BlockId], arrays: Sequence[KVArray]) -> None:
        """Fill blocks that belong to the caller."""
        if self._rows is None:
            layout = self.paged.layout
            shape = (layout.num_layers, len(ids), self.block_tokens, *layout.token_shape)
            stacked = torch.from_numpy(np.stack(arrays)).view(layout.dtype).view(shape)
            self.paged.scatter(ids, self._copies.to_device(stacked))
            return
        where = _slice_or_index(ids)
        for rows, array in zip(self._rows, arrays, strict=True):
            rows[where] = array

    @property
    def rows(self) -> list[KVArray]:
        """All memory that transfers may read and write, one array a layer; nothing where it is out of their reach."""
        return [] if self._rows is None else self._rows

    def blocks(self, ids: Sequence[BlockId], layers: range | None = None) -> KVBlocks:
        """Pinned blocks for a transfer to read: where they lie, or a copy where a transfer cannot reach them."""
        chosen = self.paged.held if layers is None else layers
        if self._rows is None:
            data = self._copies.to_host(self.paged.gather(ids, chosen))
            return KVBlocks.of([_rows(layer) for layer in data], chosen.start)
        return KVBlocks(tuple(self._rows), tuple(ids), self.paged.held.start).layers(chosen.start, chosen.stop)

    def fill(self, ids: Sequence[BlockId], fill: Callable[[KVBlocks], None], layers: range | None = None) -> None:
        """Have a transfer write blocks that belong to the caller. When `fill` raises, they hold anything."""
        chosen = self.paged.held if layers is None else layers
        if self._rows is not None:
            fill(self.blocks(ids, chosen))
            return
        layout = self.paged.layout
        shape = (len(chosen), len(ids), self.block_tokens, *layout.token_shape)
        staged = torch.empty(shape, dtype=layout.dtype)
        fill(KVBlocks.of([_rows(layer) for layer in staged], chosen.start))
        self.paged.scatter(ids, self._copies.to_device(staged), chosen)

    def import_prefix(self, hashes: Sequence[BlockHash], first: int, fill: FillIds, bare: int = 0) -> OutOfBlocks | None:
        """Keep blocks that come from elsewhere: `fill` brings the KV of `hashes[first:]`, those before `bare` without window
        state; their ancestors are cached here.

        Blocks that are cached meanwhile are left as they are. When an ancestor was evicted meanwhile, nothing is kept.
        """
        reserved = self.reserve(hashes, len(hashes))
        if isinstance(reserved, OutOfBlocks):
            return reserved
        table, held = reserved
        try:
            if first <= held < len(hashes):
                fill(table[held:], held - first)
                self.commit(table, held, hashes, bare)
        finally:
            self.release(table)
        return None


def _rows(layer: torch.Tensor) -> KVArray:
    """A layer's blocks as rows of bytes; shares memory."""
    rows: KVArray = layer.flatten(1).view(torch.uint8).numpy()
    return rows


def _slice_or_index(ids: Sequence[BlockId]) -> slice | list[BlockId]:
    if ids and list(ids) == list(range(ids[0], ids[0] + len(ids))):
        return slice(ids[0], ids[0] + len(ids))
    return list(ids)
