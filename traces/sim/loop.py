"""Virtual time: a heap of actions ordered by (time, priority, sequence).

At equal times what has ended comes before what is reported, reports before arrivals, arrivals before timers. Engines
begin their next step after all that, so that a step takes in everything that was there at its start; who only looks, looks
last. Equal priorities keep the order in which they were planned, which makes a run a pure function of its inputs.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any


class At(IntEnum):
    """Order of actions that fall on the same moment."""

    COMPLETION = 0
    REPORT = 1
    ARRIVAL = 2
    TIMER = 3
    STEP_BEGIN = 4
    SAMPLE = 5


class EventLoop:
    """Runs planned actions in order. What they leave in `inbox` is handled after each action, at the same virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.inbox: deque[Any] = deque()
        self._heap: list[tuple[float, int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._sequence = 0

    def at(self, time_s: float, order: At, action: Callable[..., object], *args: Any) -> None:
        """Plan `action(*args)`. Raises ValueError for a time that has passed."""
        if time_s < self.now:
            raise ValueError(f"time {time_s} lies before the present {self.now}")
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, order, self._sequence, action, args))

    @property
    def pending(self) -> bool:
        """Whether anything is planned."""
        return bool(self._heap)

    def run(self, empty_inbox: Callable[[], None]) -> None:
        """Run until nothing is planned. `empty_inbox` is called whenever an action has left something there."""
        heap, inbox, pop = self._heap, self.inbox, heapq.heappop
        while heap:
            self.now, _, _, action, args = pop(heap)
            action(*args)
            if inbox:
                empty_inbox()
