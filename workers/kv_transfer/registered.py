"""KV read straight out of the source's cache, and written straight into the target's: what one-sided transports share.

The source copies nothing. A ticket says where its blocks lie, and the target has the library read them (RDMA, or what the
library puts in its place) while the source does not even know. So the source cannot tell a reader that its offer has ended;
instead every offer owns a word of registered memory that is unique while the offer lives and zero as soon as it has ended,
before the blocks may be used again. The target reads the word after the blocks: when it is still there, so were they. That
makes the target as safe from torn and recycled blocks as a checksum would, at the price of eight bytes.
"""

from __future__ import annotations

import secrets
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workers.kv_transfer.base import KVDescriptor, KVTicket, OfferGone, TransferError, TransportUnavailable
from workers.kv_transfer.blocks import KVArray, KVBlocks
from workers.kv_transfer.leased import LeasedTransport, wrong_length

MAX_OFFERS = 4096
MAX_FETCHES = 256
WORD_BYTES = 8

Read: TypeAlias = tuple[int, int, int]
"""Local address, remote address, bytes."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where offered blocks lie: block `ids[i]` of the k-th layer at `bases[k] + ids[i] * bytes of a block`, at `peer`."""

    peer: Any
    bases: tuple[int, ...]
    ids: tuple[int, ...]
    word_address: int
    word: int


@dataclass(slots=True)
class Region:
    """Registered memory, kept while anybody needs it."""

    memory: KVArray
    users: int = 0


class Words:
    """Registered words, one a user, handed out and taken back. Thread-safe."""

    def __init__(self, count: int) -> None:
        self.memory: NDArray[np.uint64] = np.zeros(count, np.uint64)
        self._free = list(range(count))
        self._lock = threading.Lock()

    def take(self) -> int:
        with self._lock:
            if not self._free:
                raise TransferError(f"{len(self.memory)} transfers are alive at once, and no more are allowed")
            return self._free.pop()

    def give_back(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)

    def address(self, slot: int) -> int:
        return int(self.memory.ctypes.data) + slot * WORD_BYTES

    @property
    def row(self) -> KVArray:
        """All words as one row of bytes."""
        return self.memory.view(np.uint8).reshape(1, -1)


class RegisteredTransport(LeasedTransport):
    """Derived classes register memory and read from a peer's."""

    checksums = False

    def __init__(self, kv: KVDescriptor, clock: Callable[[], float] = time.time) -> None:
        super().__init__(kv, clock)
        self._alive, self._seen = Words(MAX_OFFERS), Words(MAX_FETCHES)
        self._slots: dict[str, int] = {}
        self._memory_lock = threading.Lock()
        self._memory: dict[tuple[int, int], Region] = {}
        self._lent: dict[str, list[tuple[int, int]]] = {}
        self._closed = False

    def register(self, rows: Sequence[KVArray]) -> None:
        self._enrol(rows)

    def _enrol(self, rows: Sequence[KVArray]) -> list[tuple[int, int]]:
        """Have memory registered until it is struck off as often as it was enrolled."""
        places = [(int(layer.ctypes.data), layer.nbytes) for layer in rows]
        with self._memory_lock:
            if self._closed:
                raise TransportUnavailable(f"transport {self.name!r} is closed")
            for place, layer in zip(places, rows, strict=True):
                region = self._memory.get(place)
                if region is None:
                    self._register(*place)
                    region = self._memory[place] = Region(layer)
                region.users += 1
        return places

    def _strike(self, places: Sequence[tuple[int, int]]) -> None:
        with self._memory_lock:
            for place in places:
                region = self._memory.get(place)
                if region is None:
                    continue  # closed meanwhile
                region.users -= 1
                if not region.users:
                    self._deregister(*place)
                    del self._memory[place]

    def _register_words(self) -> None:
        """For the constructors of derived classes, once their library runs."""
        self.register((self._alive.row, self._seen.row))

    def _publish(self, offer_id: str, blocks: KVBlocks) -> Location:
        slot = self._alive.take()
        self._lent[offer_id] = self._enrol(blocks.rows)
        word = secrets.randbits(63) + 1
        self._alive.memory[slot] = word
        self._slots[offer_id] = slot
        bases = tuple(int(layer.ctypes.data) for layer in blocks.rows)
        return Location(self._peer(), bases, blocks.ids, self._alive.address(slot), word)

    def _receive(self, ticket: KVTicket, into: KVBlocks, first: int, timeout_s: float) -> None:
        location: Location = ticket.location
        if (len(location.ids), len(location.bases)) != (ticket.blocks, ticket.layers):
            raise wrong_length(ticket, f"{len(location.ids)} blocks of {len(location.bases)} layers")
        deadline_s = time.monotonic() + timeout_s
        places = self._enrol(into.rows)
        try:
            self._read(location.peer, list(_reads(location, into, first, ticket.kv.layer_block_bytes)), deadline_s)
        finally:
            self._strike(places)
        if not self._still_alive(location, deadline_s):
            raise OfferGone(f"offer {ticket.id} has been released")

    def _still_alive(self, location: Location, deadline_s: float) -> bool:
        slot = self._seen.take()
        self._seen.memory[slot] = 0  # else it might hold the word of an earlier fetch
        try:
            self._read(location.peer, [(self._seen.address(slot), location.word_address, WORD_BYTES)], deadline_s)
            return int(self._seen.memory[slot]) == location.word
        finally:
            self._seen.give_back(slot)

    def _withdraw(self, offer_id: str) -> None:
        slot = self._slots.pop(offer_id)
        self._alive.memory[slot] = 0
        self._alive.give_back(slot)
        self._strike(self._lent.pop(offer_id))

    def close(self) -> None:
        super().close()
        with self._memory_lock:
            if self._closed:
                return
            self._closed = True
            for place in self._memory:
                self._deregister(*place)
            self._memory.clear()
            self._end()

    @abstractmethod
    def _peer(self) -> Any:
        """What a target needs to reach this source."""

    @abstractmethod
    def _register(self, address: int, nbytes: int) -> None: ...

    @abstractmethod
    def _deregister(self, address: int, nbytes: int) -> None: ...

    @abstractmethod
    def _end(self) -> None:
        """Let go of the library, so that no thread of it is left."""

    @abstractmethod
    def _read(self, peer: Any, reads: Sequence[Read], deadline_s: float) -> None:
        """Carry out all reads. When it raises, nothing is written any more."""


def _reads(location: Location, into: KVBlocks, first: int, block_bytes: int) -> Iterator[Read]:
    """The fewest reads that bring the blocks: runs that lie side by side on both sides, layer by layer."""
    runs = list(_joint_runs(location.ids[first : first + len(into.ids)], into.ids))
    for base, layer in zip(location.bases, into.rows, strict=True):
        local = int(layer.ctypes.data)
        for theirs, ours, count in runs:
            yield local + ours * block_bytes, base + theirs * block_bytes, count * block_bytes


def _joint_runs(theirs: Sequence[int], ours: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    start = 0
    for stop in range(1, len(ours) + 1):
        ends = stop == len(ours) or theirs[stop] != theirs[stop - 1] + 1 or ours[stop] != ours[stop - 1] + 1
        if ends:
            yield theirs[start], ours[start], stop - start
            start = stop
