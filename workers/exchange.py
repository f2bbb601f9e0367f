"""Where a worker's KV lies, and how blocks of it are offered to other workers and filled from theirs.

The blocks of one pool, and of one prompt, may lie in several places, each with some of the layers (`staged.py`); a ticket is
for one place. So whoever wants blocks names the layers where its own places begin, `cuts`, and gets a ticket for each run of
layers that lies in one place on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from conductor.core.types import BlockHash, WorkerId
from workers.block_pool import BlockId
from workers.device_cache import DeviceCache
from workers.kv_transfer.base import KVTicket
from workers.kv_transfer.blocks import KVBlocks
from workers.kv_transfer.paired import PairedTransports


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks `blocks[first:]` can be fetched with `tickets`, some layers with each; all of `blocks` are held, and pinned until
    release."""

    blocks: tuple[BlockHash, ...]
    first: int
    tickets: tuple[KVTicket, ...]
    worker: WorkerId

    @property
    def id(self) -> str:
        return self.tickets[0].id

    @property
    def transport(self) -> str:
        return self.tickets[0].transport

    @property
    def nbytes(self) -> int:
        return sum(ticket.nbytes for ticket in self.tickets)


class Exchange(Protocol):
    """All but `release` and `expire` block, for transfer threads."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """The layers at which another place begins."""

    def publish(self, ids: Sequence[BlockId], layers: range, peer: str | None) -> KVTicket:
        """Offer pinned blocks, in layers that lie in one place, to `peer`."""

    def fetch(self, ticket: KVTicket, ids: Sequence[BlockId], first: int = 0) -> None:
        """Fill the caller's blocks with the offered blocks `first...`, in the ticket's layers, which lie in one place here."""

    def release(self, ticket_id: str) -> None:
        """End an offer. Unknown ones are ignored."""

    def expire(self) -> tuple[str, ...]:
        """End offers whose lease is over; the ids of those that were made in this process."""

    def close(self) -> None:
        """End everything that this has begun."""


class LocalExchange:
    """Everything in this process."""

    cuts: tuple[int, ...] = ()

    def __init__(self, cache: DeviceCache, transport: PairedTransports, lease_s: float) -> None:
        self._cache = cache
        self._transport = transport
        self._lease_s = lease_s

    def publish(self, ids: Sequence[BlockId], layers: range, peer: str | None) -> KVTicket:
        return self._transport.offer(self._cache.blocks(ids, layers), self._lease_s, peer)

    def fetch(self, ticket: KVTicket, ids: Sequence[BlockId], first: int = 0) -> None:
        def fill(into: KVBlocks) -> None:
            self._transport.fetch(ticket, into, self._lease_s, first)

        self._cache.fill(ids, fill, range(ticket.first_layer, ticket.stop_layer))

    def release(self, ticket_id: str) -> None:
        self._transport.release(ticket_id)

    def expire(self) -> tuple[str, ...]:
        return self._transport.expire()

    def close(self) -> None:
        self._transport.close()


def split(layers: range, cuts: Sequence[int]) -> list[range]:
    """Layers in runs, of which another begins at each cut."""
    bounds = sorted({layers.start, layers.stop, *(cut for cut in cuts if cut in layers)})
    return [range(start, stop) for start, stop in pairwise(bounds)]
