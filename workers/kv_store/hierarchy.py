"""All tiers of one worker together: blocks sink from the device pool through them, and what each has to tell is collected.

A prefix is written to the fastest tier first, and from there to the next, so the device pool is read once and a slow disk
delays nothing above it. What a tier reports goes to the Conductor with the worker's own stamps; the tiers of a host and the
shared one are one holder each, so any worker's snapshot of them stands for all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

from conductor.core.types import BlockHash, Tier, TierReport
from workers.kv_store.base import KVTier, TierChange
from workers.kv_store.opening import OpenedTiers
from workers.kv_store.write_behind import Prefix, Source, WriteBehind
from workers.kv_transfer.base import KVArray

CLOSE_TIMEOUT_S = 3.0
MIN_TELLING_BYTES = 1 << 20
LEARNING_RATE = 0.3


class Hierarchy:
    """Thread-safe. `pool` gives rows of what the device pool holds."""

    def __init__(self, opened: OpenedTiers, pool: Source, queue_blocks: int) -> None:
        self._failures = dict(opened.failures)
        self.tiers: Mapping[Tier, KVTier] = {tier.tier: tier for tier in opened.tiers}
        self._bytes_per_s = dict(opened.bytes_per_s)
        self._writers: list[WriteBehind] = []
        above: list[Source] = []
        for tier in opened.tiers:
            writer = WriteBehind(tier, [*above, pool], queue_blocks)
            if self._writers:
                self._writers[-1].on_written = writer.add
            self._writers.append(writer)
            above.insert(0, partial(_rows_of, tier))

    def keep(self, names: Sequence[BlockHash], traffic_class: str, new: int) -> None:
        """Write a prefix, the last `new` blocks of which were just computed, to every tier some time soon. Never waits."""
        if self._writers and new > 0:
            self._writers[0].add(Prefix(tuple(names), traffic_class, new))

    def was_read(self, tier: Tier, nbytes: int, duration_s: float) -> None:
        """Learn from a restore how fast a tier is; small ones tell more of the way than of the tier."""
        if nbytes >= MIN_TELLING_BYTES:
            speed, known = nbytes / duration_s, self._bytes_per_s.get(tier)
            self._bytes_per_s[tier] = speed if known is None else known + LEARNING_RATE * (speed - known)

    def capacities(self) -> dict[Tier, int]:
        return {tier: kept.capacity_blocks for tier, kept in self.tiers.items()}

    def changes(self) -> list[tuple[Tier, TierChange]]:
        """What was stored and removed since the last call, in order."""
        return [(tier, change) for tier, kept in self.tiers.items() for change in kept.drain_changes()]

    def look(self) -> list[tuple[Tier, TierChange]]:
        """The same, and then what others have stored and removed since they were last looked at. Blocks."""
        return [(tier, change) for tier, kept in self.tiers.items() for change in kept.look()]

    def snapshot(self) -> dict[Tier, tuple[BlockHash, ...]]:
        """Everything that is held. Blocks."""
        return {tier: kept.snapshot() for tier, kept in self.tiers.items()}

    def reports(self) -> tuple[TierReport, ...]:
        """How each tier is doing, those that could not be opened included. Blocks."""
        missing = [TierReport(tier=tier, failure=failure) for tier, failure in self._failures.items()]
        return tuple(sorted([*missing, *map(self._report, self._writers)], key=lambda report: report.tier))

    def _report(self, writer: WriteBehind) -> TierReport:
        tier = writer.tier.tier
        try:
            stats = asdict(writer.tier.stats())
        except OSError as error:
            stats = {"tier": tier, "failure": str(error)}
        return TierReport(
            **stats,
            dropped=writer.dropped,
            waiting=writer.waiting_blocks,
            read_bytes_per_s=self._bytes_per_s.get(tier),
        )

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was kept has been written to all tiers; False if that took too long."""
        until_s = time.monotonic() + timeout_s
        return all(writer.flush(max(0.0, until_s - time.monotonic())) for writer in self._writers)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write what can be written in time, then let go of memory and files, memory first: a disk may hang."""
        self.flush(timeout_s)
        for writer in self._writers:
            writer.close()
            writer.tier.close()


@contextmanager
def _rows_of(tier: KVTier, names: Sequence[BlockHash], first: int) -> Iterator[list[KVArray]]:
    """A tier as a source."""
    depth = tier.match(names)
    if depth <= first:
        yield []
        return
    with tier.read(names[first:depth]) as rows:
        yield rows
