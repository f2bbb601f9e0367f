"""A tier that keeps blocks in another number format than the cache does: fewer bytes at rest, for some loss if it is lossy.

Encoding and decoding happen around any tier, which keeps, checks and describes the packed bytes and knows nothing of it. The
format is part of the packed bytes' description, so workers that disagree on it find nothing of each other's.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from conductor.core.types import Tier
from models.kv_codec import BlockCodec
from workers.coded_transport import coded_descriptor
from workers.kv_store.base import BlockFormat, KVTier
from workers.kv_store.wrapping import WrappingTier
from workers.kv_transfer.base import KVArray

AT_REST = (Tier.DISK, Tier.SHARED)
"""Tiers that are packed. Host memory is mapped as it is."""


class CodedTier(WrappingTier):
    """`inner` must have been opened for `packed_format`."""

    def __init__(self, inner: KVTier, block_format: BlockFormat, codec: BlockCodec) -> None:
        super().__init__(inner, block_format)
        self._codec = codec

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
