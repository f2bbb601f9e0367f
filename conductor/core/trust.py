"""How far a worker's claims about its cache are believed, from what was claimed and what was really reused.

Every finished prefill says how many tokens it reused. Held against what the worker had claimed for that prompt, an
exponentially weighted share tells whether its reports can be taken at their word (EXACT) or not (DEGRADED). The claims of a
degraded worker are discounted by that share, and everything it holds is asked for anew. Expected blocks are no claim of the
worker, and what was to be fetched from elsewhere is not its promise either, so neither counts against it.
"""

from __future__ import annotations

from enum import StrEnum

from conductor.core.prefill_pool import PrefillPool
from conductor.core.types import WorkerId

LEARNING_RATE = 0.2
DEGRADED_BELOW = 0.75
EXACT_ABOVE = 0.9


class TrustLevel(StrEnum):
    EXACT = "exact"
    DEGRADED = "degraded"


class Trust:
    """Keeps `PrefillPool.trust` and `distrusted`."""

    def __init__(self) -> None:
        self._share: dict[WorkerId, float] = {}
        self._degraded: dict[WorkerId, None] = {}

    def level(self, worker: WorkerId) -> TrustLevel:
        return TrustLevel.DEGRADED if worker in self._degraded else TrustLevel.EXACT

    def share(self, worker: WorkerId) -> float:
        """The kept share of what the worker claimed lately."""
        return self._share.get(worker, 1.0)

    def forget(self, worker: WorkerId) -> None:
        """The worker's life is over; the next one is believed again."""
        self._share.pop(worker, None)
        self._degraded.pop(worker, None)

    def observe(self, worker: WorkerId, claimed_tokens: int, reused_tokens: int, pool: PrefillPool) -> bool:
        """Learn from one prefill. True if the worker's claims proved wrong just now: ask it for everything that it holds."""
        if claimed_tokens <= 0:
            return False
        kept = min(1.0, reused_tokens / claimed_tokens)
        share = self._share[worker] = self.share(worker) + LEARNING_RATE * (kept - self.share(worker))
        if share < DEGRADED_BELOW:
            self._degraded[worker] = None
        elif share > EXACT_ABOVE:
            self._degraded.pop(worker, None)
        believed = share if worker in self._degraded else 1.0
        if pool.trust[pool.row[worker]] != believed:
            pool.believe(worker, believed)
        return worker in self._degraded and kept < EXACT_ABOVE
