"""What all transports share: ids, leases, layout checks and checksums around three primitives, publish, receive and withdraw.

A transport derives from `LeasedTransport` and says how bytes are published, received and withdrawn. Everything that may be
refused is refused here, in the same words for all: a foreign ticket, another layout, an expired lease, a wrong length, a wrong
checksum. A lease that ends during a fetch fails it, since the source may have used its blocks again meanwhile.
"""

from __future__ import annotations

import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from workers.kv_transfer.base import (
    CorruptTransfer,
    KVDescriptor,
    KVTicket,
    KVTransport,
    LayoutMismatch,
    OfferGone,
    TransferError,
)
from workers.kv_transfer.blocks import KVArray, KVBlocks


class LeasedTransport(KVTransport):
    """Book-keeping of offers. `checksums` says whether bytes leave what is trusted."""

    checksums = True

    def __init__(self, kv: KVDescriptor, clock: Callable[[], float] = time.time) -> None:
        self.kv = kv
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, float] = {}

    @property
    def offered(self) -> int:
        return len(self._leases)

    def register(self, rows: Sequence[KVArray]) -> None:
        """Most transports take memory as it comes."""

    def offer(self, blocks: KVBlocks, lease_s: float) -> KVTicket:
        self._check_shapes(blocks)
        checksums = blocks.checksums() if self.checksums else None
        offer_id = uuid.uuid4().hex
        location = self._publish(offer_id, blocks)
        expires_s = self._clock() + lease_s
        with self._lock:
            self._leases[offer_id] = expires_s
        extent = len(blocks.ids), blocks.first_layer, len(blocks.rows)
        return KVTicket(offer_id, self.name, self.kv, *extent, checksums, expires_s, location)

    def fetch(self, ticket: KVTicket, into: KVBlocks, timeout_s: float, first: int = 0) -> None:
        if ticket.transport != self.name:
            raise TransferError(f"ticket {ticket.id} is for transport {ticket.transport!r}; this worker has {self.name!r}")
        if ticket.kv != self.kv:
            raise LayoutMismatch(f"offered KV is {ticket.kv}; this cache holds {self.kv}")
        self._check_extent(ticket, into, first)
        self._check_lease(ticket)
        self._receive(ticket, into, first, timeout_s)
        self._check_lease(ticket)
        if ticket.checksums is not None and ticket.checksums[first : first + len(into.ids)] != into.checksums():
            raise CorruptTransfer(f"the checksums of offer {ticket.id} do not match its bytes")

    def release(self, ticket_id: str) -> None:
        with self._lock:
            known = self._leases.pop(ticket_id, None)
        if known is not None:
            self._withdraw(ticket_id)

    def expire(self) -> tuple[str, ...]:
        now = self._clock()
        with self._lock:
            over = tuple(offer_id for offer_id, expires_s in self._leases.items() if now >= expires_s)
        for offer_id in over:
            self.release(offer_id)
        return over

    def close(self) -> None:
        for offer_id in list(self._leases):
            self.release(offer_id)

    def _check_lease(self, ticket: KVTicket) -> None:
        if self._clock() >= ticket.expires_s:
            raise OfferGone(f"the lease of offer {ticket.id} is over")

    def _check_shapes(self, blocks: KVBlocks) -> None:
        """Before anything is published: the caller's memory is what the descriptor says."""
        stop = blocks.first_layer + len(blocks.rows)
        fits = all(rows.ndim == 2 and rows.shape[1] == self.kv.layer_block_bytes for rows in blocks.rows)
        highest = max(blocks.ids, default=0)
        if not (blocks.rows and stop <= self.kv.num_layers and fits and all(highest < len(rows) for rows in blocks.rows)):
            found = f"layers {blocks.first_layer}..{stop} with shapes {sorted({rows.shape for rows in blocks.rows})}"
            expected = f"at most {self.kv.num_layers} layers of {self.kv.layer_block_bytes} B a block, blocks up to {highest}"
            raise LayoutMismatch(f"KV is {found}; {expected} are expected")

    def _check_extent(self, ticket: KVTicket, into: KVBlocks, first: int) -> None:
        self._check_shapes(into)
        layers = into.first_layer, len(into.rows)
        if layers != (ticket.first_layer, ticket.layers) or first < 0 or first + len(into.ids) > ticket.blocks:
            asked = f"blocks {first}..{first + len(into.ids)} of layers {layers[0]}..{sum(layers)}"
            raise LayoutMismatch(f"{asked} are asked of offer {ticket.id}; it has {_extent(ticket)}")

    @abstractmethod
    def _publish(self, offer_id: str, blocks: KVBlocks) -> Any:
        """Make the bytes fetchable; returns the ticket's location."""

    @abstractmethod
    def _receive(self, ticket: KVTicket, into: KVBlocks, first: int, timeout_s: float) -> None:
        """Fill `into` from the ticket's location. Raises `TransferError`."""

    @abstractmethod
    def _withdraw(self, offer_id: str) -> None:
        """Let go of an offer's bytes."""


def _extent(ticket: KVTicket) -> str:
    return f"{ticket.blocks} blocks of layers {ticket.first_layer}..{ticket.stop_layer}"


def wrong_length(ticket: KVTicket, found: str) -> CorruptTransfer:
    return CorruptTransfer(f"offer {ticket.id} holds {found}; {_extent(ticket)} are expected")
