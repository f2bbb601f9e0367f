"""The contract of every KV transport: a source offers packed KV, a target fetches it by ticket, the source releases it.

    TransferError
    |-- TransportUnavailable   the transport cannot work here: a library, device or peer is missing
    |-- LayoutMismatch         offered bytes mean something else than the target's cache holds
    |-- OfferGone              released, past its lease, or lost with its source
    |-- CorruptTransfer        length or checksum is not what the ticket says
    `-- TransferTimeout        the bytes did not come in time

KV is offered and filled where it lies (`blocks.py`): some blocks of all layers, or of a group of layers, so that one group may
travel while the next is computed. A ticket is picklable and describes the bytes completely, so a target refuses what it cannot
hold before it reads anything. An offer lives until it is released or its lease ends; a fetch that returns has brought bytes
that were on offer all the while. `offer` and `fetch` block and may be called from several threads at once; when a fetch raises,
what it was to fill holds anything, and nothing else is left behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.kv_transfer.blocks import KVArray as KVArray  # part of the contract
from workers.kv_transfer.blocks import KVBlocks


class TransferError(Exception):
    """KV bytes could not be moved; nothing has changed on either side."""


class TransportUnavailable(TransferError):
    """The transport cannot work here."""


class LayoutMismatch(TransferError):
    """The bytes on offer do not fit the target's cache."""


class OfferGone(TransferError):
    """The offer has been released, has expired, or was lost with its source."""


class CorruptTransfer(TransferError):
    """What arrived is not what was offered."""


class TransferTimeout(TransferError):
    """The bytes did not arrive in time."""


@dataclass(frozen=True, slots=True)
class KVDescriptor:
    """What the bytes of a cache mean. Equal descriptors: the bytes of a block may be copied as they are."""

    layout: str
    version: int
    dtype: str
    token_shape: tuple[int, ...]
    num_layers: int
    block_tokens: int
    layer_block_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_block_bytes


@dataclass(frozen=True, slots=True)
class KVTicket:
    """The right to fetch one offer: `blocks` blocks of layers `first_layer .. first_layer + layers`.

    `location` belongs to the transport. `expires_s` is Unix time: clocks of a cluster must agree to well within a lease.
    `checksums` are the XXH3 of each block over these layers, None where the bytes do not leave what is trusted.
    """

    id: str
    transport: str
    kv: KVDescriptor
    blocks: int
    first_layer: int
    layers: int
    checksums: tuple[int, ...] | None
    expires_s: float
    location: Any

    @property
    def nbytes(self) -> int:
        return self.blocks * self.layers * self.kv.layer_block_bytes

    @property
    def stop_layer(self) -> int:
        return self.first_layer + self.layers


class KVTransport(ABC):
    """Moves packed KV between two workers that have the same transport."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which it is configured; tickets carry it."""

    @property
    @abstractmethod
    def protocol(self) -> str:
        """What really carries the bytes, as far as it is known."""

    @property
    @abstractmethod
    def offered(self) -> int:
        """How many offers are alive."""

    @abstractmethod
    def register(self, rows: Sequence[KVArray]) -> None:
        """Tell of memory that offers will lie in and fetches will fill, so that it is made ready once and not each time.

        The caller keeps it until `close`.
        """

    @abstractmethod
    def offer(self, blocks: KVBlocks, lease_s: float) -> KVTicket:
        """Publish KV. The source must keep the blocks as they are until the offer is released."""

    @abstractmethod
    def fetch(self, ticket: KVTicket, into: KVBlocks, timeout_s: float, first: int = 0) -> None:
        """Fill `into`, which belongs to the caller, with the offered blocks `first...`, as many as `into` has, verified."""

    @abstractmethod
    def release(self, ticket_id: str) -> None:
        """End an offer of this source. Unknown ids are ignored."""

    @abstractmethod
    def expire(self) -> tuple[str, ...]:
        """End the offers whose lease is over; returns their ids."""

    @abstractmethod
    def close(self) -> None:
        """End every offer."""
