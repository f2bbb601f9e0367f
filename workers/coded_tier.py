"""A tier that keeps blocks in another number format than the cache does: fewer bytes at rest, for some loss if it is lossy.

Encoding and decoding happen around any tier, which keeps, checks and describes the packed bytes and knows nothing of it. The
format is part of the packed bytes' description, so workers that disagree on it find nothing of each other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from conductor.core.types import BlockHash, Tier
from models.kv_codec import BlockCodec
from workers.coded_transport import coded_descriptor
from workers.kv_store.base import BlockFormat, KVTier, NewBlock, TierStats
from workers.kv_store.opening import OpenedTiers
from workers.kv_store.retention import HeldBlock
from workers.kv_transfer.base import KVArray

AT_REST = (Tier.DISK, Tier.SHARED)
"""Tiers that are packed. Host memory is mapped as it is."""


class CodedTier(KVTier):
    """`inner` must have been opened for `packed_format`."""

    def __init__(self, inner: KVTier, block_format: BlockFormat, codec: BlockCodec) -> None:
        super().__init__(block_format)
        self.tier = inner.tier
        self.counters, self.changes = inner.counters, inner.changes
        self._inner, self._codec = inner, codec

    @property
    def capacity_blocks(self) -> int:
        return self._inner.capacity_blocks

    def match(self, blocks: Sequence[BlockHash]) -> int:
        return self._inner.match(blocks)

    def put(self, blocks: Sequence[NewBlock]) -> int:
        return self._inner.put([replace(block, data=self._packed(block.data)) for block in blocks])

    def expect(self, blocks: Sequence[BlockHash]) -> None:
        self._inner.expect(blocks)

    @contextmanager
    def read(self, blocks: Sequence[BlockHash]) -> Iterator[list[KVArray]]:
        with self._inner.read(blocks) as rows:
            yield [self._unpacked(row) for row in rows]

    def remove(self, blocks: Iterable[BlockHash]) -> int:
        return self._inner.remove(blocks)

    def pin(self, blocks: Sequence[BlockHash]) -> int:
        return self._inner.pin(blocks)

    def unpin(self, blocks: Sequence[BlockHash]) -> None:
        self._inner.unpin(blocks)

    def snapshot(self) -> tuple[BlockHash, ...]:
        return self._inner.snapshot()

    def has_news(self) -> bool:
        return self._inner.has_news()

    def held(self) -> list[HeldBlock]:
        return self._inner.held()

    def stats(self) -> TierStats:
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()

    def _packed(self, row: KVArray) -> KVArray:
        layers = torch.from_numpy(row if row.flags.writeable else row.copy()).view(self.format.kv.num_layers, -1)
        packed: KVArray = self._codec.encode(layers).flatten().numpy()
        return packed

    def _unpacked(self, row: KVArray) -> KVArray:
        layers = torch.from_numpy(row if row.flags.writeable else row.copy()).view(self.format.kv.num_layers, -1)
        plain: KVArray = self._codec.decode(layers).flatten().numpy()
        return plain


def packed_format(block_format: BlockFormat, codec: BlockCodec) -> BlockFormat:
    """What a tier at rest is told of the packed bytes."""
    return replace(block_format, kv=coded_descriptor(block_format.kv, codec))


def coded_tiers(opened: OpenedTiers, block_format: BlockFormat, codec: BlockCodec) -> OpenedTiers:
    """The same tiers, those at rest behind the codec."""
    tiers = tuple(CodedTier(tier, block_format, codec) if tier.tier in AT_REST else tier for tier in opened.tiers)
    return replace(opened, tiers=tiers)
