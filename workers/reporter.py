"""What a worker tells the Conductor: events in batches, stamped, in order, and never in the way of the work.

Block changes get a stamp (worker id, epoch, sequence from 1) when they are sent. While the Conductor does not answer, what
happened to requests is kept; block changes are not, since the snapshot that opens every epoch covers them. A report that
failed detaches the worker until `attach` is called again, with a new epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conductor.core.events import BlocksRemoved, BlocksStored, Event, IndexSnapshot, LoadReported
from conductor.core.types import BlockHash, Stamp, Tier, TierReport, WorkerId, WorkerLoad
from workers.block_pool import PoolChange, Stored
from workers.device_cache import DeviceCache
from workers.kv_store.hierarchy import Hierarchy

logger = logging.getLogger(__name__)

MAX_KEPT_EVENTS = 100_000
MAX_LOOKED_BLOCKS = 2048


class Reporter:
    """For one event loop. `run` is its only task."""

    def __init__(
        self, worker_id: WorkerId, cache: DeviceCache, store: Hierarchy, load: Callable[[], WorkerLoad], interval_s: float
    ) -> None:
        self._worker_id = worker_id
        self._cache = cache
        self._store = store
        self._load = load
        self._interval_s = interval_s
        self._outbox: deque[Event] = deque(maxlen=MAX_KEPT_EVENTS)
        self._wake = asyncio.Event()
        self._conductor: Any | None = None
        self._epoch = 0
        self._seq = 0
        self._snapshot_due = False
        self._look_due = False
        self._last_load: tuple[WorkerLoad, tuple[TierReport, ...]] | None = None
        self._tiers: tuple[TierReport, ...] = ()

    @property
    def attached(self) -> bool:
        return self._conductor is not None

    @property
    def epoch(self) -> int:
        return self._epoch

    def attach(self, conductor: Any, epoch: int) -> None:
        """Report to `conductor`, from a snapshot on. An epoch older than the current one is ignored."""
        if epoch < self._epoch:
            return
        self._conductor, self._epoch, self._seq = conductor, epoch, 0
        self._last_load = None
        self.ask_snapshot()

    def ask_snapshot(self) -> None:
        self._snapshot_due = True
        self._wake.set()

    def ask_look(self) -> None:
        """Others may have changed what the tiers hold."""
        self._look_due = True
        self._wake.set()

    def add(self, *events: Event) -> None:
        self._outbox.extend(events)
        self._wake.set()

    def tell_tiers(self, tiers: tuple[TierReport, ...]) -> None:
        """How the tiers are doing; told with the load, when either has changed."""
        if tiers != self._tiers:
            self._tiers = tiers
            self._wake.set()

    def touch(self) -> None:
        """Blocks or load may have changed."""
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wait()
            await self.flush()

    async def flush(self) -> None:
        """Send what there is to tell, and wait until it has arrived."""
        conductor = self._conductor
        if conductor is None:
            return
        looked = await self._look_if_due()
        held = await self._held_if_due()
        batch = self._collect(looked if held is None else [], held)
        if not batch:
            return
        try:
            await conductor.report.remote(batch)
        except Exception as error:
            logger.warning("the Conductor did not take a report: %s", type(error).__name__)
            kept = [
                event for event in batch if not isinstance(event, BlocksStored | BlocksRemoved | IndexSnapshot | LoadReported)
            ]
            self._outbox.extendleft(reversed(kept))
            if self._conductor is conductor:
                self._conductor = None

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._interval_s):
                await self._wake.wait()
        except TimeoutError:
            return
        finally:
            self._wake.clear()

    async def _look_if_due(self) -> Sequence[tuple[Tier, PoolChange]]:
        """What others have changed in the tiers, to be told before anything newer. Much of that had better come in a snapshot,
        which is taken in by pieces."""
        if not self._look_due or self._snapshot_due:
            return ()
        self._look_due = False
        looked = await asyncio.to_thread(self._store.look)
        self._snapshot_due |= sum(len(change.blocks) for _, change in looked) > MAX_LOOKED_BLOCKS
        return looked

    async def _held_if_due(self) -> Mapping[Tier, tuple[BlockHash, ...]] | None:
        """What the tiers hold, when a snapshot is due; listing a disk must not hold up anything else."""
        if not self._snapshot_due:
            return None
        return await asyncio.to_thread(self._store.snapshot) if self._store.tiers else {}

    def _collect(
        self, looked: Sequence[tuple[Tier, PoolChange]], held: Mapping[Tier, tuple[BlockHash, ...]] | None
    ) -> list[Event]:
        """`looked` is what a look at the tiers has found; `held` what they hold, when a snapshot is due."""
        batch = [self._block_event(tier, change) for tier, change in looked]
        if held is not None:
            self._snapshot_due = self._look_due = False
            batch.append(IndexSnapshot(self._stamp(), {Tier.DEVICE: self._cache.snapshot(), **held}))
        batch += [self._block_event(Tier.DEVICE, change) for change in self._cache.drain_changes()]
        batch += [self._block_event(tier, change) for tier, change in self._store.changes()]
        batch += self._outbox
        self._outbox.clear()
        load = self._load(), self._tiers
        if load != self._last_load:
            self._last_load = load
            batch.append(LoadReported(self._worker_id, self._epoch, *load))
        return batch

    def _block_event(self, tier: Tier, change: PoolChange) -> Event:
        if isinstance(change, Stored):
            return BlocksStored(self._stamp(), tier, change.parent, change.blocks)
        return BlocksRemoved(self._stamp(), tier, change.blocks)

    def _stamp(self) -> Stamp:
        self._seq += 1
        return Stamp(self._worker_id, self._epoch, self._seq)
