"""Processors of one machine that several simulated engines share.

Where more engines compute than there are processors, each gets an equal part of them, so everything takes as much longer. A
prefill step keeps the length with which it began, for it is short; a batch that decodes is told of every change.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class Processors:
    """Mutable: which engines compute. `stretch` is by how much longer than alone everything takes."""

    def __init__(self, count: float = math.inf) -> None:
        self.stretch = 1.0
        self._count = count
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
        stretch = max(1.0, len(self._computing) / self._count)
        if stretch != self.stretch:
            self.stretch = stretch
            for changed in self._followers:
                changed()
