"""A transport around another one: what it does not do in its own way, the inner one does."""

from __future__ import annotations

from collections.abc import Sequence

from workers.kv_transfer.base import KVTicket, KVTransport
from workers.kv_transfer.blocks import KVArray, KVBlocks


class WrappingTransport(KVTransport):
    def __init__(self, inner: KVTransport) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def protocol(self) -> str:
        return self._inner.protocol

    @property
    def offered(self) -> int:
        return self._inner.offered

    def register(self, rows: Sequence[KVArray]) -> None:
        self._inner.register(rows)

    def offer(self, blocks: KVBlocks, lease_s: float) -> KVTicket:
        return self._inner.offer(blocks, lease_s)

    def fetch(self, ticket: KVTicket, into: KVBlocks, timeout_s: float, first: int = 0) -> None:
        self._inner.fetch(ticket, into, timeout_s, first)

    def release(self, ticket_id: str) -> None:
        self._inner.release(ticket_id)

    def expire(self) -> tuple[str, ...]:
        return self._inner.expire()

    def close(self) -> None:
        self._inner.close()
