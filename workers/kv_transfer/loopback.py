"""KV between workers of one process: offered bytes are copied once and lie in a fabric that the workers share.

For tests and for single-process use. Tickets hold no bytes, so they pickle like any other transport's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from workers.kv_transfer.base import KVDescriptor, KVTicket, OfferGone
from workers.kv_transfer.blocks import KVArray, KVBlocks
from workers.kv_transfer.leased import LeasedTransport, wrong_length

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

    def _publish(self, offer_id: str, blocks: KVBlocks) -> None:
        self._fabric[offer_id] = blocks.copy()

    def _receive(self, ticket: KVTicket, into: KVBlocks, first: int, timeout_s: float) -> None:
        arrays = self._fabric.get(ticket.id)
        if arrays is None:
            raise OfferGone(f"offer {ticket.id} has been released")
        if len(arrays) != ticket.layers or len(arrays[0]) != ticket.blocks:
            raise wrong_length(ticket, f"{len(arrays[0])} blocks of {len(arrays)} layers")
        for layer, array in enumerate(arrays):
            into.fill(layer, array[first : first + len(into.ids)])

    def _withdraw(self, offer_id: str) -> None:
        self._fabric.pop(offer_id, None)
