"""A slower link, for tests and demonstrations: any transport, with its fetches held back to a bandwidth and a latency.

The link is shared: transfers that overlap get equal parts of it, as on a real one. It says what it is in `protocol`, so that a
figure measured over it can never pass for one of the real link.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from workers.kv_transfer.base import KVTicket, KVTransport, TransferTimeout
from workers.kv_transfer.blocks import KVBlocks
from workers.kv_transfer.wrapping import WrappingTransport


@dataclass(frozen=True, slots=True)
class LinkLimit:
    """None means unlimited. `link_gbps` counts gigabits a second."""

    link_gbps: float | None = None
    latency_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.link_gbps is not None and not self.link_gbps > 0:
            raise ValueError(f"link_gbps is {self.link_gbps!r}; it must be above 0, or null for no limit")
        if not self.latency_ms >= 0:
            raise ValueError(f"latency_ms is {self.latency_ms!r}; it must be at least 0")

    @property
    def limits(self) -> bool:
        return self.link_gbps is not None or self.latency_ms > 0

    def transfer_s(self, nbytes: int) -> float:
        return 0.0 if self.link_gbps is None else nbytes * 8 / (self.link_gbps * 1e9)

    def __str__(self) -> str:
        speed = "" if self.link_gbps is None else f" to {self.link_gbps:g} Gbit/s"
        return f"throttled{speed}, {self.latency_ms:g} ms latency"


class SharedLink:
    """Bytes on a link of limited bandwidth. Time on it is counted in bytes that each transfer under way has been given, so a
    transfer ends when its own have come, whatever others come and go meanwhile. Thread-safe."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._changed = threading.Condition()
        self._given_bytes = 0.0
        self._under_way = 0
        self._counted_s = time.monotonic()

    def carry(self, nbytes: int, deadline_s: float) -> bool:
        """Wait as long as the bytes take; False when that is past the deadline."""
        with self._changed:
            self._join(1)
            end_bytes = self._given_bytes + nbytes
            try:
                while self._given_bytes < end_bytes and self._counted_s < deadline_s:
                    rest_s = (end_bytes - self._given_bytes) * self._under_way / self._bytes_per_s
                    self._changed.wait(max(0.0, min(rest_s, deadline_s - self._counted_s)))
                    self._count()
            finally:
                self._join(-1)
            return self._given_bytes >= end_bytes

    def _join(self, step: int) -> None:
        self._count()
        self._under_way += step
        self._changed.notify_all()

    def _count(self) -> None:
        now_s = time.monotonic()
        self._given_bytes += (now_s - self._counted_s) * self._bytes_per_s / max(1, self._under_way)
        self._counted_s = now_s


class ThrottledTransport(WrappingTransport):
    def __init__(self, inner: KVTransport, limit: LinkLimit) -> None:
        super().__init__(inner)
        self._limit = limit
        self._link = None if limit.link_gbps is None else SharedLink(limit.link_gbps * 1e9 / 8)

    @property
    def protocol(self) -> str:
        return f"{self._inner.protocol} ({self._limit})"

    def fetch(self, ticket: KVTicket, into: KVBlocks, timeout_s: float, first: int = 0) -> None:
        """Takes what the limited link takes; the bytes themselves move when it has let them through."""
        deadline_s = time.monotonic() + timeout_s
        least_s = self._limit.transfer_s(into.nbytes) + self._limit.latency_ms / 1000
        if least_s > timeout_s:
            raise TransferTimeout(f"offer {ticket.id} would take {least_s:.3f} s, more than {timeout_s:g} s")
        time.sleep(self._limit.latency_ms / 1000)
        if self._link is not None and not self._link.carry(into.nbytes, deadline_s):
            raise TransferTimeout(f"offer {ticket.id} takes more than {timeout_s:g} s over a link that others use too")
        self._inner.fetch(ticket, into, max(0.0, deadline_s - time.monotonic()), first)
