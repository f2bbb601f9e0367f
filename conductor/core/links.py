"""What links are worth as measured: bandwidth and latency from each source to each target, in place of what profiles say.

A profile is measured on one machine by itself. Workers measure what really comes from each peer (`LinkMeasured`), and that is
believed of the pair. From a peer that it has never fetched from, a worker is believed to get the median of what the others
gave it. What overlapping transfers get together takes the place of the card's line rate where it is less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from conductor.core.events import LinkMeasured
from conductor.core.prefill_pool import PrefillPool
from conductor.core.types import WorkerId
from conductor.core.worker_table import FloatArray


@dataclass(frozen=True, slots=True)
class Outbound:
    """Links from one source to every prefill worker, in the order of `ids`. The arrays are not to be written to."""

    ids: tuple[WorkerId, ...]
    bytes_per_s: FloatArray
    latency_s: FloatArray


class Links:
    """Measurements by target and source, kept in step with the prefill pool's columns."""

    def __init__(self, pool: PrefillPool) -> None:
        self._pool = pool
        self._into: dict[WorkerId, dict[WorkerId, LinkMeasured]] = {}
        self._outbound: dict[WorkerId, Outbound] = {}

    def observe(self, event: LinkMeasured) -> None:
        """Of a worker that is known, in its current life."""
        if min(event.bytes_per_s, event.shared_bytes_per_s) <= 0.0 or event.latency_s < 0.0:
            return
        sources = self._into.setdefault(event.worker_id, {})
        sources[event.source] = event
        self._outbound.clear()
        if event.worker_id in self._pool:
            seen = [(link.bytes_per_s, link.shared_bytes_per_s, link.latency_s) for link in sources.values()]
            self._pool.relink(event.worker_id, *np.median(seen, axis=0).tolist())

    def forget(self, worker: WorkerId) -> None:
        """Links from it say something of those who fetched, and stay; so a target keeps its belief."""
        self._into.pop(worker, None)
        self._outbound.clear()

    def outbound(self, source: WorkerId) -> Outbound | None:
        """The links from a source; None where nothing is known of them but what the pool's columns say."""
        if not self._into:
            return None
        known = self._outbound.get(source)
        if known is None or known.ids is not self._pool.ids:
            known = self._outbound[source] = self._gather(source)
        return known

    def _gather(self, source: WorkerId) -> Outbound:
        pool = self._pool
        bytes_per_s, latency_s = pool.link_bytes_per_s.copy(), pool.latency_s.copy()
        for target, sources in self._into.items():
            if source in sources and target in pool:
                row, link = pool.row[target], sources[source]
                bytes_per_s[row], latency_s[row] = link.bytes_per_s, link.latency_s
        return Outbound(pool.ids, bytes_per_s, latency_s)

    def describe(self, worker: WorkerId) -> dict[str, Any]:
        """How KV comes from each peer, as JSON values."""
        return {
            source: {
                "transport": link.transport,
                "protocol": link.protocol,
                "bytes_per_s": link.bytes_per_s,
                "shared_bytes_per_s": link.shared_bytes_per_s,
                "latency_s": link.latency_s,
            }
            for source, link in sorted(self._into.get(worker, {}).items())
        }
