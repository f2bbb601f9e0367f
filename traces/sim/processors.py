"""Processors of one machine that several simulated engines share.

Where more engines compute than there are processors, each gets an equal part of them, so everything takes as much longer. And
processors that compute at once crowd one another, for they share caches and memory: what all of them take for a step, over what
one takes while the others idle, is `crowding`. A prefill step keeps the length with which it began, for it is short; a batch
that decodes is told of every change.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class Processors:
    """Mutable: which engines compute. `stretch` is by how much longer than alone everything takes. A `count` that is not whole
    leaves a part of them to what is not simulated."""

    def __init__(self, count: float = math.inf, crowding: float = 1.0) -> None:
        self.stretch = 1.0
        self._count = count
        self._crowding = crowding
        self._computing: set[object] = set()
        self._followers: list[Callable[[], None]] = []

    def follow(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever `stretch` has changed."""
        self._followers.append(changed)

    def begin(self, engine: object) -> float:
        """The engine computes from now on, `stretch` times as long as alone."""
        self._computing.add(engine)
        self._count_anew()
        return self.stretch

    def end(self, engine: object) -> None:
        """The engine is idle, or dead."""
        self._computing.discard(engine)
        self._count_anew()

    def _count_anew(self) -> None:
        computing = len(self._computing)
        stretch = max(1.0, computing / self._count) * self._crowded(computing)
        if stretch != self.stretch:
            self.stretch = stretch
            for changed in self._followers:
                changed()

    def _crowded(self, computing: int) -> float:
        others, most = min(computing, self._count) - 1, self._count - 1
        return 1.0 + (self._crowding - 1.0) * others / most if others > 0 and math.isfinite(most) else 1.0
