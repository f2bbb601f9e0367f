"""What links are worth as measured: bandwidth and latency from each source to each target, in place of what profiles say.

A profile is measured on one machine by itself. Workers measure what really comes from each peer (`LinkMeasured`) and the link
of a target is believed to be the median over the peers that it has fetched from. What overlapping transfers get together takes
the place of the card's line rate where it is less.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conductor.core.events import LinkMeasured
from conductor.core.prefill_pool import PrefillPool
from conductor.core.types import WorkerId


class Links:
    """Measurements by target and source, kept in step with the prefill pool's columns."""

    def __init__(self, pool: PrefillPool) -> None:
        self._pool = pool
        self._into: dict[WorkerId, dict[WorkerId, LinkMeasured]] = {}

    def observe(self, event: LinkMeasured) -> None:
        """Of a worker that is known, in its current life."""
        if min(event.bytes_per_s, event.shared_bytes_per_s) <= 0.0 or event.latency_s < 0.0:
            return
        sources = self._into.setdefault(event.worker_id, {})
        sources[event.source] = event
        if event.worker_id in self._pool:
            seen = [(link.bytes_per_s, link.shared_bytes_per_s, link.latency_s) for link in sources.values()]
            self._pool.relink(event.worker_id, *np.median(seen, axis=0).tolist())

    def forget(self, worker: WorkerId) -> None:
        """Links from it say something of those who fetched, and stay; so a target keeps its belief."""
        self._into.pop(worker, None)

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
