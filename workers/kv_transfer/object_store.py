"""KV through Ray's object store: one object an offer, read without a copy on the same host, sent by Ray between hosts.

All pieces of an offer go into one `put`, because each object costs far more than its bytes, and they travel out of band, so the
cache's own memory is copied once, straight into the store, and from there once into the target's cache. A piece stays below the
size from which Ray copies with a pool of threads, which costs more than it gains where cores are busy computing. A ticket
carries the object reference, which keeps the object alive until both the source has released it and no ticket is left.

Fresh pages of shared memory cost ten times the copy into them, so a worker that has no other transport touches the part of the
store that it is likely to use when it starts (`store_pages.py`).
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import ray
from numpy.lib.stride_tricks import as_strided
from ray.exceptions import GetTimeoutError, RayError

from workers.kv_transfer.base import KVDescriptor, KVTicket, OfferGone, TransferError, TransferTimeout
from workers.kv_transfer.blocks import KVArray, KVBlocks
from workers.kv_transfer.leased import LeasedTransport, wrong_length
from workers.kv_transfer.store_pages import touch_store

MAX_PIECE_BYTES = (1 << 20) - 1
TOUCHED_BYTES = 256 << 20


class ObjectStoreTransport(LeasedTransport):
    """Needs a process that is connected to Ray. The owner of every object is the offering worker: it dies, they are gone."""

    name = "object_store"
    protocol = "Ray object store"

    def __init__(
        self,
        kv: KVDescriptor,
        *,
        checksums: bool = True,
        touched_bytes: int = TOUCHED_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(kv, clock)
        self.checksums = checksums
        self._touched_bytes = touched_bytes
        self._references: dict[str, ray.ObjectRef[Any]] = {}

    def register(self, rows: Sequence[KVArray]) -> None:
        """The memory needs nothing; the store's own is touched, as far as one hand-over of it all could reach."""
        if self._touched_bytes:
            touch_store(min(self._touched_bytes, sum(layer.nbytes for layer in rows)))

    def _publish(self, offer_id: str, blocks: KVBlocks) -> ray.ObjectRef[Any]:
        try:
            reference = ray.put(_Pieces(blocks))
        except RayError as error:
            raise TransferError(f"the object store did not take the KV: {type(error).__name__}") from error
        self._references[offer_id] = reference
        return reference

    def _receive(self, ticket: KVTicket, into: KVBlocks, first: int, timeout_s: float) -> None:
        try:
            pieces: list[list[Any]] = ray.get(ticket.location, timeout=timeout_s)
        except GetTimeoutError as error:
            raise TransferTimeout(f"offer {ticket.id} did not arrive within {timeout_s:g} s") from error
        except RayError as error:
            raise OfferGone(f"offer {ticket.id} is lost with its source: {type(error).__name__}") from error
        block_bytes = ticket.kv.layer_block_bytes
        layers = [joined([np.frombuffer(piece, np.uint8).reshape(-1, block_bytes) for piece in layer]) for layer in pieces]
        if {sum(map(len, layer)) for layer in layers} != {ticket.blocks} or len(layers) != ticket.layers:
            raise wrong_length(ticket, f"{[sum(map(len, layer)) for layer in layers]} blocks a layer")
        for number, layer in enumerate(layers):
            _fill(into, number, layer, first)

    def _withdraw(self, offer_id: str) -> None:
        self._references.pop(offer_id, None)


class _Pieces:
    """Blocks on their way into the store: pickled as a list of buffers a layer, which are not copied on the way."""

    def __init__(self, blocks: KVBlocks) -> None:
        self._blocks = blocks

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[list[list[pickle.PickleBuffer]]]]:
        layers = range(len(self._blocks.rows))
        return list, ([[pickle.PickleBuffer(piece.data) for piece in _small(self._blocks.views(layer))] for layer in layers],)


def _small(views: list[KVArray]) -> Iterator[KVArray]:
    for view in views:
        step = max(1, MAX_PIECE_BYTES // view.shape[1])
        yield from (view[start : start + step] for start in range(0, len(view), step))


def joined(pieces: list[KVArray]) -> list[KVArray]:
    """The same memory with pieces that lie side by side as one, whose copy may go past the processor's caches."""
    views: list[KVArray] = []
    for piece in pieces:
        if views and views[-1].ctypes.data + views[-1].nbytes == piece.ctypes.data:
            views[-1] = as_strided(views[-1], (len(views[-1]) + len(piece), piece.shape[1]), writeable=False)
        else:
            views.append(piece)
    return views


def _fill(into: KVBlocks, layer: int, pieces: list[KVArray], first: int) -> None:
    """Write the rows `first...` of a layer, which lie in several pieces, one after the other."""
    at = -first
    for piece in pieces:
        wanted = piece[max(0, -at) : max(0, len(into.ids) - at)]
        if len(wanted):
            into.fill(layer, wanted, max(0, at))
        at += len(piece)


def spans_hosts() -> bool:
    """Whether Ray joins several hosts: only then do bytes leave this one's memory, and are worth a checksum."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return len({node["NodeManagerHostname"] for node in nodes if node["Alive"]}) > 1
