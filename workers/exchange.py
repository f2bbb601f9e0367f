"""Where a worker's KV lies, and how blocks of it are offered to other workers and filled from theirs.

The blocks of one pool, and of one prompt, may lie in several places, each with some of the layers (`staged.py`); a ticket is
for one place. So whoever wants blocks names the layers where its own places begin, `cuts`, and gets a ticket for each run of
layers that lies in one place on both sides. Only a pool that lies in one place can give a block window state later on
(`DeviceCache.commit`), so the others get blocks in all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from conductor.core.types import BlockHash, WorkerId
from workers.block_pool import BlockId, OutOfBlocks
from workers.device_cache import DeviceCache
from workers.jobs import HandoverPart
from workers.kv_transfer.base import KVTicket
from workers.kv_transfer.blocks import KVBlocks
from workers.kv_transfer.paired import PairedTransports
from workers.needed_state import prefix_parts


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks `blocks[first:]` can be fetched in `parts`; all of `blocks` are held, and pinned until release. Those before
    `bare` come without the state of their window layers."""

    blocks: tuple[BlockHash, ...]
    first: int
    bare: int
    parts: tuple[HandoverPart, ...]
    worker: WorkerId

    @property
    def id(self) -> str:
        return self.parts[0].ticket.id

    @property
    def transport(self) -> str:
        return self.parts[0].ticket.transport

    @property
    def nbytes(self) -> int:
        return sum(part.ticket.nbytes for part in self.parts)


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


@dataclass(frozen=True, slots=True)
class Held:
    """Pinned blocks of a prefix, to be offered; those before `bare` without window state."""

    ids: list[BlockId]
    bare: int


def hold_prefix(cache: DeviceCache, blocks: Sequence[BlockHash], first: int, cuts: Sequence[int], replayed: int) -> Held | None:
    """Pin of a prefix what serves a peer that has its first `first` blocks; None where that is nothing more.

    What can be reused here, with the window state that later tokens see. Else, where a peer gains by computing its last
    `replayed` blocks again, what is here without window state.
    """
    ids = cache.acquire(blocks, whole=bool(cuts))
    if len(ids) > first:
        return Held(ids, 0 if cuts else max(0, len(ids) - cache.window_blocks))
    cache.release(ids)
    layout = cache.paged.layout
    if cuts or all(map(layout.has_window, range(layout.num_layers))):
        return None
    ids = cache.acquire_bare(blocks)
    if len(ids) - first > replayed:
        return Held(ids, len(ids))
    cache.release(ids)
    return None


def publish_prefix(
    exchange: Exchange, cache: DeviceCache, held: Held, first: int, peer: WorkerId | None, cuts: Sequence[int]
) -> tuple[HandoverPart, ...]:
    """Offer the blocks of a prefix to a peer, all but the first `first`."""
    ids = held.ids
    return tuple(
        HandoverPart(blocks.start, exchange.publish(ids[blocks.start : blocks.stop], run, peer))
        for blocks, layers in prefix_parts(cache.paged.layout, range(first, len(ids)), held.bare)
        for run in split(layers, (*exchange.cuts, *cuts))
    )


def fetch_prefix(exchange: Exchange, cache: DeviceCache, offer: Offer) -> OutOfBlocks | None:
    """Fetch what is offered and keep it."""

    def fill(ids: Sequence[BlockId], skip: int) -> None:
        begin = offer.first + skip
        for part in offer.parts:
            missing = range(max(begin, part.first_block), part.blocks.stop)
            if missing:
                into = ids[missing.start - begin : missing.stop - begin]
                exchange.fetch(part.ticket, into, missing.start - part.first_block)

    return cache.import_prefix(offer.blocks, offer.first, fill, offer.bare)


def split(layers: range, cuts: Sequence[int]) -> list[range]:
    """Layers in runs, of which another begins at each cut."""
    bounds = sorted({layers.start, layers.stop, *(cut for cut in cuts if cut in layers)})
    return [range(start, stop) for start, stop in pairwise(bounds)]
