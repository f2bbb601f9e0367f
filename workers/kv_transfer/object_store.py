"""KV through Ray's object store: one object an offer, read without a copy on the same host, sent by Ray between hosts.

All layers go into one `put`, because each object costs far more than its bytes; the arrays travel out of band, so the cache's
own memory is copied once, straight into the store. A ticket carries the object reference, which keeps the object alive until
both the source has released it and no ticket is left. On the target the arrays are read-only views of the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from workers.kv_transfer.base import KVArray, KVDescriptor, KVTicket, OfferGone, TransferError, TransferTimeout
from workers.kv_transfer.leased import LeasedTransport


class ObjectStoreTransport(LeasedTransport):
    """Needs a process that is connected to Ray. The owner of every object is the offering worker: it dies, they are gone."""

    name = "object_store"
    protocol = "Ray object store"

    def __init__(self, kv: KVDescriptor, *, checksums: bool = True, clock: Callable[[], float] = time.time) -> None:
        super().__init__(kv, clock)
        self.checksums = checksums
        self._references: dict[str, ray.ObjectRef[Any]] = {}

    def _publish(self, offer_id: str, arrays: Sequence[KVArray]) -> ray.ObjectRef[Any]:
        try:
            reference = ray.put(list(arrays))
        except RayError as error:
            raise TransferError(f"the object store did not take the KV: {type(error).__name__}") from error
        self._references[offer_id] = reference
        return reference

    def _receive(self, ticket: KVTicket, timeout_s: float) -> list[KVArray]:
        try:
            arrays: list[KVArray] = ray.get(ticket.location, timeout=timeout_s)
        except GetTimeoutError as error:
            raise TransferTimeout(f"offer {ticket.id} did not arrive within {timeout_s:g} s") from error
        except RayError as error:
            raise OfferGone(f"offer {ticket.id} is lost with its source: {type(error).__name__}") from error
        return arrays

    def _withdraw(self, offer_id: str) -> None:
        self._references.pop(offer_id, None)
