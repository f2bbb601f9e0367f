"""What a simulated worker tells the scheduler: events in order, stamped, and late by a configured lag."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conductor.core.events import BlocksRemoved, BlocksStored, Event, IndexSnapshot
from conductor.core.types import Stamp, Tier
from traces.sim.loop import At, EventLoop


class Reporter:
    """Reports of one source during one life (`epoch`). Without lag `deliver` sees an event at once, else `lag_s` later."""

    def __init__(
        self, loop: EventLoop, source: str, epoch: int, deliver: Callable[[Event], None], *, lag_s: float = 0.0
    ) -> None:
        self.source = source
        self.epoch = epoch
        self._loop = loop
        self._deliver = deliver
        self._lag_s = lag_s
        self._seq = 0

    def emit(self, event: Event) -> None:
        if self._lag_s > 0:
            self._loop.at(self._loop.now + self._lag_s, At.REPORT, self._deliver, event)
        else:
            self._deliver(event)

    def stored(self, tier: Tier, parent: int | None, blocks: Sequence[int]) -> None:
        self.emit(BlocksStored(self._stamp(), tier, parent, tuple(blocks)))

    def removed(self, tier: Tier, blocks: Sequence[int]) -> None:
        self.emit(BlocksRemoved(self._stamp(), tier, tuple(blocks)))

    def snapshot(self, blocks: dict[Tier, tuple[int, ...]]) -> None:
        """Everything that the source holds; later events continue from it."""
        self.emit(IndexSnapshot(Stamp(self.source, self.epoch, self._seq), blocks))

    def _stamp(self) -> Stamp:
        self._seq += 1
        return Stamp(self.source, self.epoch, self._seq)
