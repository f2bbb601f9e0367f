"""How fast each peer's KV really comes: a line through the transfers from it, latency plus bytes over bandwidth.

Only the last transfers count, so the line follows a link that changes. Transfers that overlap share what carries them; each
counts as if it had had its share alone, seconds over the mean number under way, so that the line describes the idle link and
whoever plans divides by what is in flight. Sizes that hardly differ cannot tell latency from bandwidth; then the latency stays
what it was last found to be.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

WINDOW = 16  # transfers; a link that changes is followed within as many
MIN_SPREAD = 0.3  # standard deviation over mean of the sizes, below which they say nothing about latency
MIN_TRANSFERS = 3


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    latency_s: float
    bytes_per_s: float

    def transfer_s(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(slots=True)
class Moved:
    """What a transfer turned out to be."""

    peer: str = ""
    transport: str = ""
    nbytes: int = 0

    def was(self, peer: str, transport: str, nbytes: int) -> None:
        self.peer, self.transport, self.nbytes = peer, transport, nbytes


class Line:
    """The last transfers over one link, as (bytes, seconds)."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._latency_s = 0.0

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, nbytes: int, seconds: float) -> None:
        self._seen.append((nbytes, seconds))

    def speed(self) -> LinkSpeed:
        """The line with the least relative errors, and with nothing negative."""
        sizes, times = (np.asarray(column, dtype=np.float64) for column in zip(*self._seen, strict=True))
        weights = times**-2.0 / np.sum(times**-2.0)
        size, seconds = float(weights @ sizes), float(weights @ times)
        variance = float(weights @ (sizes - size) ** 2)
        if variance > (MIN_SPREAD * size) ** 2:
            slope = max(0.0, float(weights @ ((sizes - size) * (times - seconds))) / variance)
            self._latency_s = max(0.0, seconds - slope * size)
        latency_s = min(self._latency_s, 0.9 * float(times.min()))
        return LinkSpeed(latency_s, size / max(seconds - latency_s, 1e-9))


class LinkMeter:
    """Transfers into one worker, by peer and transport. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, str], Line] = {}
        self._in_flight = 0
        self._busy = 0.0  # integral of the number under way over time
        self._changed_s = clock()

    @contextmanager
    def transfer(self) -> Iterator[Moved]:
        """Around all that a transfer makes its receiver wait for; evidence if it tells what was moved and does not raise."""
        moved = Moved()
        began_s, began_busy = self._count(1)
        done = False
        try:
            yield moved
            done = True
        finally:
            ended_s, ended_busy = self._count(-1)
            seconds = ended_s - began_s
            if done and moved.nbytes > 0 and seconds > 0:
                shared_by = max(1.0, (ended_busy - began_busy) / seconds)
                self.add(moved.peer, moved.transport, moved.nbytes, seconds / shared_by)

    def add(self, peer: str, transport: str, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._lines.setdefault((peer, transport), Line()).add(nbytes, seconds)

    def speed(self, peer: str, transport: str) -> LinkSpeed | None:
        """None while too little has come from there."""
        with self._lock:
            line = self._lines.get((peer, transport))
            return None if line is None or len(line) < MIN_TRANSFERS else line.speed()

    def _count(self, change: int) -> tuple[float, float]:
        """The time, and the integral up to it."""
        with self._lock:
            now = self._clock()
            self._busy += self._in_flight * (now - self._changed_s)
            self._changed_s = now
            self._in_flight += change
            return now, self._busy
