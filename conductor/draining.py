"""Workers on their way out: no new work, what is worth keeping copied elsewhere, and the process ended once it is idle.

The scheduler decides what is copied (`TransferBlocks` with reason `drain`); here only the end is awaited: no request is placed
on the worker, the transfers from it are over, and it says itself, twice in a row, that it holds nothing for anybody. A worker
that dies meanwhile is gone all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from conductor.core.events import Event, TransferFailed, TransferFinished
from conductor.core.types import WorkerId
from conductor.worker_calls import Worker

logger = logging.getLogger(__name__)

POLL_S = 0.25
IDLE_ANSWERS = 2
BUSY_FIGURES = ("queued", "running", "pinned_blocks", "offers")


class Drains:
    """`stop` ends a worker's process, given its handle; `in_use` tells of placed requests. For one event loop."""

    def __init__(self, stop: Callable[[Any], None], in_use: Callable[[WorkerId], bool]) -> None:
        self.retired: set[WorkerId] = set()
        self._stop = stop
        self._in_use = in_use
        self._transfers: dict[str, WorkerId] = {}

    def transfer_began(self, transfer_id: str, source: WorkerId) -> None:
        self._transfers[transfer_id] = source

    def observe(self, event: Event) -> None:
        if isinstance(event, TransferFinished | TransferFailed):
            self._transfers.pop(event.transfer_id, None)

    async def finish(self, worker: Worker) -> None:
        """Return when the worker has been stopped or is lost."""
        idle_answers = 0
        while idle_answers < IDLE_ANSWERS:
            await asyncio.sleep(POLL_S)
            idle = await self._is_idle(worker)
            if idle is None:
                break
            idle_answers = idle_answers + 1 if idle else 0
        self.retired.add(worker.spec.id)
        logger.info("worker %s is drained", worker.spec.id)
        self._stop(worker.handle)

    async def _is_idle(self, worker: Worker) -> bool | None:
        """None when the worker does not answer any more."""
        try:
            stats = await worker.handle.stats.remote()
        except Exception as error:
            logger.warning("worker %s was lost while it was drained: %s", worker.spec.id, type(error).__name__)
            return None
        wanted = self._in_use(worker.spec.id) or worker.spec.id in self._transfers.values()
        return not wanted and not any(stats.get(name, 0) for name in BUSY_FIGURES)
