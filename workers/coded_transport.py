"""A transport that moves KV in another number format than the cache keeps it in: fewer bytes, for some loss if it is lossy.

Chosen by configuration for a whole cluster. Encoding and decoding happen here, on either side of any transport, which moves
the packed bytes and knows nothing of it; its tickets describe the packed bytes, so two workers that disagree on the format
refuse each other's offers. Blocks that came in a lossy format are cached and handed on as they are, in a KV namespace
of their own (`models.folder.namespace_in_formats`), so that they never pass for exact ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from models.base import KVLayout
from models.kv_codec import BlockCodec
from workers.kv_transfer.base import KVDescriptor, KVTicket, KVTransport
from workers.kv_transfer.blocks import KVArray, KVBlocks
from workers.kv_transfer.wrapping import WrappingTransport


def coded_descriptor(kv: KVDescriptor, codec: BlockCodec) -> KVDescriptor:
    """What a transport is told of the packed bytes."""
    return replace(kv, dtype=f"{kv.dtype} as {codec.name}", layer_block_bytes=codec.layer_block_bytes)


def block_codec(name: str | None, layout: KVLayout, block_tokens: int) -> BlockCodec | None:
    """The codec of a configured name; None where KV moves as it is cached."""
    if name is None:
        return None
    codec = BlockCodec(name, layout, block_tokens)
    return None if codec.layer_block_bytes == codec.plain_layer_block_bytes and codec.keeps_bits else codec


class CodedTransport(WrappingTransport):
    """`inner` must have been made for `coded_descriptor`."""

    def __init__(self, inner: KVTransport, codec: BlockCodec) -> None:
        super().__init__(inner)
        self._codec = codec

    @property
    def protocol(self) -> str:
        return f"{self._inner.protocol}, {self._codec.name}"

    def register(self, rows: Sequence[KVArray]) -> None:
        """The cache's own memory is never moved from or to, only what is packed from it."""

    def offer(self, blocks: KVBlocks, lease_s: float) -> KVTicket:
        packed = [self._codec.encode(torch.from_numpy(array)).numpy() for array in blocks.copy()]
        return self._inner.offer(KVBlocks.of(packed, blocks.first_layer), lease_s)

    def fetch(self, ticket: KVTicket, into: KVBlocks, timeout_s: float, first: int = 0) -> None:
        shape = len(into.ids), self._codec.layer_block_bytes
        packed = KVBlocks.of([np.empty(shape, np.uint8) for _ in into.rows], into.first_layer)
        self._inner.fetch(ticket, packed, timeout_s, first)
        for layer, array in enumerate(packed.rows):
            into.fill(layer, self._codec.decode(torch.from_numpy(array)).numpy())
