"""A transport that moves KV in another number format than the cache keeps it in: fewer bytes, for some loss if it is lossy.

Chosen by configuration for a whole cluster. Encoding and decoding happen here, on either side of any transport, which moves
the packed bytes and knows nothing of it; its tickets describe the packed bytes, so two workers that disagree on the format
refuse each other's offers. Blocks that came in a lossy format are cached and handed on as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from models.base import KVLayout
from models.kv_codec import BlockCodec
from workers.kv_transfer.base import KVArray, KVDescriptor, KVTicket, KVTransport


def coded_descriptor(kv: KVDescriptor, codec: BlockCodec) -> KVDescriptor:
    """What a transport is told of the packed bytes."""
    return replace(kv, dtype=f"{kv.dtype} as {codec.name}", layer_block_bytes=codec.layer_block_bytes)


def block_codec(name: str | None, layout: KVLayout, block_tokens: int) -> BlockCodec | None:
    """The codec of a configured name; None where KV moves as it is cached."""
    if name is None:
        return None
    codec = BlockCodec(name, layout, block_tokens)
    return None if codec.layer_block_bytes == codec.plain_layer_block_bytes and codec.keeps_bits else codec


class CodedTransport(KVTransport):
    """`inner` must have been made for `coded_descriptor`."""

    def __init__(self, inner: KVTransport, codec: BlockCodec) -> None:
        self._inner = inner
        self._codec = codec

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def protocol(self) -> str:
        return f"{self._inner.protocol}, {self._codec.name}"

    @property
    def offered(self) -> int:
        return self._inner.offered

    def offer(self, arrays: Sequence[KVArray], lease_s: float) -> KVTicket:
        return self._inner.offer([self._codec.encode(torch.from_numpy(array)).numpy() for array in arrays], lease_s)

    def fetch(self, ticket: KVTicket, timeout_s: float) -> list[KVArray]:
        packed = self._inner.fetch(ticket, timeout_s)
        return [self._codec.decode(torch.from_numpy(array)).numpy() for array in packed]

    def release(self, ticket_id: str) -> None:
        self._inner.release(ticket_id)

    def expire(self) -> tuple[str, ...]:
        return self._inner.expire()

    def close(self) -> None:
        self._inner.close()
