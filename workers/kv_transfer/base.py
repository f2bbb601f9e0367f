"""The contract of every KV transport: a source offers packed KV, a target fetches it by ticket, the source releases it.

    TransferError
    |-- TransportUnavailable   the transport cannot work here: a library, device or peer is missing
    |-- LayoutMismatch         offered bytes mean something else than the target's cache holds
    |-- OfferGone              released, past its lease, or lost with its source
    |-- CorruptTransfer        length or checksum is not what the ticket says
    `-- TransferTimeout        the bytes did not come in time

KV travels as one uint8 array a layer, [blocks, bytes of a block in that layer], packed by the transport into one object. A
ticket is picklable and describes the bytes completely, so a target refuses what it cannot hold before it reads anything. An
offer lives until it is released or its lease ends; a target never gets bytes of a dead offer. `offer` and `fetch` block and may
be called from several threads at once; whatever they raise, nothing is left behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

KVArray: TypeAlias = NDArray[np.uint8]


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
    """The right to fetch one offer. `location` belongs to the transport. `expires_s` is Unix time: clocks of a cluster must
    agree to well within a lease. `checksum` is the XXH3 of all bytes, None where they never leave the process."""

    id: str
    transport: str
    kv: KVDescriptor
    blocks: int
    checksum: int | None
    expires_s: float
    location: Any

    @property
    def nbytes(self) -> int:
        return self.blocks * self.kv.block_bytes


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
    def offer(self, arrays: Sequence[KVArray], lease_s: float) -> KVTicket:
        """Publish KV, one array a layer. The source must keep the arrays as they are until the offer is released."""

    @abstractmethod
    def fetch(self, ticket: KVTicket, timeout_s: float) -> list[KVArray]:
        """The offered arrays, verified; they may be read-only and are valid as long as they are referenced."""

    @abstractmethod
    def release(self, ticket_id: str) -> None:
        """End an offer of this source. Unknown ids are ignored."""

    @abstractmethod
    def expire(self) -> tuple[str, ...]:
        """End the offers whose lease is over; returns their ids."""

    @abstractmethod
    def close(self) -> None:
        """End every offer."""
