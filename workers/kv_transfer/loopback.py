"""KV between workers of one process: offered bytes are copied once and lie in a fabric that the workers share.

For tests and for single-process use. Tickets hold no bytes, so they pickle like any other transport's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from workers.kv_transfer.base import KVArray, KVDescriptor, KVTicket, OfferGone
from workers.kv_transfer.leased import LeasedTransport

Fabric: TypeAlias = dict[str, list[KVArray]]
"""Offered bytes by offer id."""


class LoopbackTransport(LeasedTransport):
    """Workers that pass the same `fabric` reach each other."""

    name = "loopback"
    protocol = "process memory"
    checksums = False

    def __init__(self, kv: KVDescriptor, fabric: Fabric, clock: Callable[[], float] = time.time) -> None:
        super().__init__(kv, clock)
        self._fabric = fabric

    def _publish(self, offer_id: str, arrays: Sequence[KVArray]) -> None:
        self._fabric[offer_id] = [array.copy() for array in arrays]

    def _receive(self, ticket: KVTicket, timeout_s: float) -> list[KVArray]:
        arrays = self._fabric.get(ticket.id)
        if arrays is None:
            raise OfferGone(f"offer {ticket.id} has been released")
        return arrays

    def _withdraw(self, offer_id: str) -> None:
        self._fabric.pop(offer_id, None)
