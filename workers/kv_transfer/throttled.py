"""A slower link, for tests and demonstrations: any transport, with its fetches held back to a bandwidth and a latency.

The link is shared: transfers that overlap queue behind each other. It says what it is in `protocol`, so that a figure measured
over it can never pass for one of the real link.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from workers.kv_transfer.base import KVTicket, KVTransport, TransferTimeout
from workers.kv_transfer.blocks import KVArray, KVBlocks


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


class ThrottledTransport(KVTransport):
    def __init__(self, inner: KVTransport, limit: LinkLimit) -> None:
        self._inner = inner
        self._limit = limit
        self._lock = threading.Lock()
        self._busy_until_s = 0.0

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def protocol(self) -> str:
        return f"{self._inner.protocol} ({self._limit})"

    @property
    def offered(self) -> int:
        return self._inner.offered

    def register(self, rows: Sequence[KVArray]) -> None:
        self._inner.register(rows)

    def offer(self, blocks: KVBlocks, lease_s: float) -> KVTicket:
        return self._inner.offer(blocks, lease_s)

    def fetch(self, ticket: KVTicket, into: KVBlocks, timeout_s: float, first: int = 0) -> None:
        began_s = time.monotonic()
        with self._lock:
            sent_s = max(self._busy_until_s, began_s) + self._limit.transfer_s(into.nbytes)
            due_s = sent_s + self._limit.latency_ms / 1000
            if due_s - began_s > timeout_s:
                raise TransferTimeout(f"offer {ticket.id} would take {due_s - began_s:.3f} s, more than {timeout_s:g} s")
            self._busy_until_s = sent_s
        self._inner.fetch(ticket, into, timeout_s, first)
        time.sleep(max(0.0, due_s - time.monotonic()))

    def release(self, ticket_id: str) -> None:
        self._inner.release(ticket_id)

    def expire(self) -> tuple[str, ...]:
        return self._inner.expire()

    def close(self) -> None:
        self._inner.close()
