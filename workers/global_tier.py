"""A tier that keeps of a block the layers that see all tokens, and not the state of sliding-window layers.

That state is most of some models' KV, and only the end of a prefix has use for it, so it stays on the host that computed it: in
its device pools, host memory and disk. Whoever restores a prefix from here rebuilds it by bounded replay (`Engine.rebuild`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from models.base import KVLayout
from workers.kv_store.base import BlockFormat, KVTier
from workers.kv_store.wrapping import WrappingTier
from workers.kv_transfer.base import KVArray


class GlobalLayersTier(WrappingTier):
    """`inner` must have been opened for `global_format` of the same `layers`."""

    def __init__(self, inner: KVTier, block_format: BlockFormat, layers: Sequence[int]) -> None:
        super().__init__(inner, block_format)
        self.bare = True
        self._layers = list(layers)

    def _packed(self, row: KVArray) -> KVArray:
        kept: KVArray = row.reshape(self.format.kv.num_layers, -1)[self._layers].reshape(-1)
        return kept

    def _unpacked(self, row: KVArray) -> KVArray:
        """Zeros in window layers."""
        block = np.zeros((self.format.kv.num_layers, self.format.kv.layer_block_bytes), dtype=np.uint8)
        block[self._layers] = row.reshape(len(self._layers), -1)
        return block.reshape(-1)


def global_layers(layout: KVLayout) -> tuple[int, ...] | None:
    """The layers without a window. None where all are, or none is: then there is nothing to tell apart."""
    layers = tuple(layer for layer in range(layout.num_layers) if not layout.has_window(layer))
    return layers if 0 < len(layers) < layout.num_layers else None


def global_format(block_format: BlockFormat, layers: Sequence[int]) -> BlockFormat:
    """What the tier is told of the bytes that it keeps."""
    return replace(block_format, kv=replace(block_format.kv, num_layers=len(layers)))
