"""How fast each peer's KV really comes: a line through the transfers from it, latency plus bytes over bandwidth.

Only the last transfers count, so the line follows a link that changes. Transfers that overlap may share what carries them, as
on a wire, or hardly disturb each other, as copies on different cores do: how far they slow each other down is learned too,
and the line describes the idle link. Sizes that hardly differ cannot tell latency from bandwidth; then the latency stays what
it was last found to be.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]
WINDOW = 24  # transfers; a link that changes is followed within as many
MIN_SPREAD = 0.3  # standard deviation over mean of the sizes, below which they say nothing about latency
MIN_TRANSFERS = 3
OVERLAPS = 1.2  # mean number under way from which a transfer says something about sharing
SHARING_RATE = 0.3
FITS = 8  # after which the weights stand still
LEAST_ERROR = 0.02
LEAST_SHARE = 0.1  # of a transfer's time that its bytes take


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """`sharing` says how far transfers that overlap slow each other down: 0 not at all, 1 as on a link that they share."""

    latency_s: float
    bytes_per_s: float
    sharing: float = 1.0

    @property
    def shared_bytes_per_s(self) -> float:
        """What two transfers at once get together."""
        return 2.0 * self.bytes_per_s / (1.0 + self.sharing)

    def transfer_s(self, nbytes: int, others: int = 0) -> float:
        """With so many `others` under way all the while."""
        return (self.latency_s + nbytes / self.bytes_per_s) * (1.0 + self.sharing * others)


@dataclass(slots=True)
class Moved:
    """What a transfer turned out to be."""

    peer: str = ""
    transport: str = ""
    nbytes: int = 0

    def was(self, peer: str, transport: str, nbytes: int) -> None:
        self.peer, self.transport, self.nbytes = peer, transport, nbytes


class Line:
    """The last transfers over one link, as (bytes, seconds, mean number under way)."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float, float]] = deque(maxlen=WINDOW)
        self._latency_s = 0.0
        self._sharing: float | None = None

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, nbytes: int, seconds: float, under_way: float = 1.0) -> None:
        if len(self) >= MIN_TRANSFERS and under_way > OVERLAPS:
            slowdown = seconds / self.speed().transfer_s(nbytes)
            seen = min(1.0, max(0.0, (slowdown - 1.0) / (under_way - 1.0)))
            self._sharing = seen if self._sharing is None else self._sharing + SHARING_RATE * (seen - self._sharing)
        self._seen.append((nbytes, seconds, under_way))

    def speed(self) -> LinkSpeed:
        """The line with the least relative errors, of which large ones count no more than others, and with nothing negative."""
        sharing = 1.0 if self._sharing is None else self._sharing
        sizes, seconds, under_way = (np.asarray(column, dtype=np.float64) for column in zip(*self._seen, strict=True))
        times = seconds / (1.0 + sharing * (under_way - 1.0))
        weights = times**-2.0
        for _ in range(FITS):
            latency_s, bytes_per_s = self._fit(sizes, times, weights / np.sum(weights))
            errors = np.abs((latency_s + sizes / bytes_per_s) / times - 1.0)
            weights = times**-2.0 / np.maximum(errors, LEAST_ERROR)
        return LinkSpeed(latency_s, bytes_per_s, sharing)

    def _fit(self, sizes: FloatArray, times: FloatArray, weights: FloatArray) -> tuple[float, float]:
        """Latency and bytes a second by weighted least squares."""
        size, time_s = float(weights @ sizes), float(weights @ times)
        variance = float(weights @ (sizes - size) ** 2)
        if variance > (MIN_SPREAD * size) ** 2:
            slope = max(0.0, float(weights @ ((sizes - size) * (times - time_s))) / variance)
            self._latency_s = max(0.0, time_s - slope * size)
        over_latency = float(weights @ (sizes * np.maximum(times - self._latency_s, LEAST_SHARE * times)))
        return self._latency_s, float(weights @ sizes**2) / over_latency


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
                under_way = max(1.0, (ended_busy - began_busy) / seconds)
                self.add(moved.peer, moved.transport, moved.nbytes, seconds, under_way)

    def add(self, peer: str, transport: str, nbytes: int, seconds: float, under_way: float = 1.0) -> None:
        with self._lock:
            self._lines.setdefault((peer, transport), Line()).add(nbytes, seconds, under_way)

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
