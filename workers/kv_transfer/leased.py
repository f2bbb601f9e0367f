"""What all transports share: ids, leases, layout checks and checksums around two primitives, publish and receive.

A transport derives from `LeasedTransport` and says how bytes are published, received and withdrawn. Everything that may be
refused is refused here, in the same words for all: a foreign ticket, another layout, an expired lease, a wrong length, a wrong
checksum.
"""

from __future__ import annotations

import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from workers.kv_transfer.base import (
    CorruptTransfer,
    KVArray,
    KVDescriptor,
    KVTicket,
    KVTransport,
    LayoutMismatch,
    OfferGone,
    TransferError,
)


class LeasedTransport(KVTransport):
    """Book-keeping of offers. `checksums` says whether bytes leave the process' trust."""

    checksums = True

    def __init__(self, kv: KVDescriptor, clock: Callable[[], float] = time.time) -> None:
        self.kv = kv
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, float] = {}

    @property
    def offered(self) -> int:
        return len(self._leases)

    def offer(self, arrays: Sequence[KVArray], lease_s: float) -> KVTicket:
        blocks = self._check_shapes(arrays, None)
        checksum = _checksum(arrays) if self.checksums else None
        offer_id = uuid.uuid4().hex
        location = self._publish(offer_id, arrays)
        expires_s = self._clock() + lease_s
        with self._lock:
            self._leases[offer_id] = expires_s
        return KVTicket(offer_id, self.name, self.kv, blocks, checksum, expires_s, location)

    def fetch(self, ticket: KVTicket, timeout_s: float) -> list[KVArray]:
        if ticket.transport != self.name:
            raise TransferError(f"ticket {ticket.id} is for transport {ticket.transport!r}; this worker has {self.name!r}")
        if ticket.kv != self.kv:
            raise LayoutMismatch(f"offered KV is {ticket.kv}; this cache holds {self.kv}")
        if self._clock() >= ticket.expires_s:
            raise OfferGone(f"the lease of offer {ticket.id} is over")
        arrays = self._receive(ticket, timeout_s)
        self._check_shapes(arrays, ticket.blocks)
        if ticket.checksum is not None and _checksum(arrays) != ticket.checksum:
            raise CorruptTransfer(f"the checksum of offer {ticket.id} does not match its bytes")
        return arrays

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

    def _check_shapes(self, arrays: Sequence[KVArray], blocks: int | None) -> int:
        """The number of blocks. Before an offer a wrong shape is the caller's mistake, after a fetch it is damage."""
        count = blocks if blocks is not None else (len(arrays[0]) if arrays else 0)
        shape = (count, self.kv.layer_block_bytes)
        if len(arrays) == self.kv.num_layers and all(array.shape == shape for array in arrays):
            return count
        found = f"{len(arrays)} arrays of shapes {sorted({array.shape for array in arrays})}"
        error = LayoutMismatch if blocks is None else CorruptTransfer
        raise error(f"KV is {found}; {self.kv.num_layers} of shape {shape} are expected")

    @abstractmethod
    def _publish(self, offer_id: str, arrays: Sequence[KVArray]) -> Any:
        """Make the bytes fetchable; returns the ticket's location."""

    @abstractmethod
    def _receive(self, ticket: KVTicket, timeout_s: float) -> list[KVArray]:
        """The bytes at the ticket's location. Raises `TransferError`."""

    @abstractmethod
    def _withdraw(self, offer_id: str) -> None:
        """Let go of an offer's bytes."""


def _checksum(arrays: Sequence[KVArray]) -> int:
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(array.data)
    return digest.intdigest()
