"""Writing to a tier behind the work: prefixes are named, not copied, and whoever names one never waits.

Each tier has a queue of names and a thread of low priority. When a prefix's turn comes, what the tier lacks of it is taken from
the nearest place that still has it: the device pool, or a faster tier. What was evicted meanwhile is lost to this tier, and so
is what finds the queue full; both are counted, and neither is waited for.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TypeAlias

from conductor.core.types import BlockHash
from workers.kv_store.base import KVTier, NewBlock
from workers.kv_transfer.base import KVArray

logger = logging.getLogger(__name__)

GROUP_BYTES = 48 << 20  # of one write and one fsync
NICENESS = 10

Source: TypeAlias = Callable[[Sequence[BlockHash], int], AbstractContextManager[list[KVArray]]]
"""`source(names, first)`: rows of as many blocks `names[first:]` as it has without a gap, valid inside of the context."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks from a root on. `new` of them, the last, have probably never been written."""

    names: tuple[BlockHash, ...]
    traffic_class: str
    new: int


class WriteBehind:
    """One tier's writer. `on_written` is called in its thread with every prefix that has had its turn."""

    def __init__(self, tier: KVTier, sources: Sequence[Source], queue_blocks: int) -> None:
        self.tier = tier
        self.dropped = 0
        self.on_written: Callable[[Prefix], None] = lambda prefix: None
        self._sources = sources
        self._limit_blocks = queue_blocks
        self._group = max(1, GROUP_BYTES // tier.format.block_bytes)
        self._queue: deque[Prefix] = deque()
        self._waiting_blocks = 0
        self._busy = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"write-{tier.tier.name.lower()}", daemon=True)
        self._thread.start()

    @property
    def waiting_blocks(self) -> int:
        return self._waiting_blocks

    def add(self, prefix: Prefix) -> None:
        """Never waits for anything but the queue itself."""
        with self._changed:
            if self._closed or self._waiting_blocks + prefix.new > self._limit_blocks:
                self.dropped += prefix.new
                return
            self._queue.append(prefix)
            self._waiting_blocks += prefix.new
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was added has had its turn; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def close(self) -> None:
        """Give up what waits, and end the thread after the write that it is in."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (prefix := self._next()) is not None:
            try:
                self._write(prefix)
            except Exception:
                logger.exception("a prefix could not be written to the %s tier", self.tier.tier.name.lower())
                self.dropped += prefix.new
            self.on_written(prefix)
            self._done(prefix)

    def _next(self) -> Prefix | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._closed)
            if self._closed:
                return None
            self._busy = True
            return self._queue.popleft()

    def _done(self, prefix: Prefix) -> None:
        with self._changed:
            self._busy = False
            self._waiting_blocks -= prefix.new
            self._changed.notify_all()

    def _write(self, prefix: Prefix) -> None:
        names = prefix.names
        depth = self.tier.match(names)
        while depth < len(names) and not self._closed:
            self._write_group(prefix, depth, min(len(names), depth + self._group))
            reached = self.tier.match(names)
            if reached <= depth:
                self.dropped += min(prefix.new, len(names) - depth)
                return
            depth = reached

    def _write_group(self, prefix: Prefix, first: int, stop: int) -> None:
        for source in self._sources:
            with source(prefix.names[:stop], first) as rows:
                if rows:
                    self.tier.put(_new_blocks(prefix, first, rows))
                    return


def _new_blocks(prefix: Prefix, first: int, rows: Sequence[KVArray]) -> list[NewBlock]:
    names = prefix.names
    return [
        NewBlock(names[at], names[at - 1] if at else None, row, prefix.traffic_class)
        for at, row in enumerate(rows, start=first)
    ]
