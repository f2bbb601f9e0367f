"""Random lengths and arrival times for generated traces, drawn in strata.

Strata: instead of `n` independent draws, one draw from each n-th part of the distribution, in random order. Every single
value is as random as before, but the mean of a few hundred lies within a percent of the law's, heavy tail or not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class LogNormalLaw:
    """Whole numbers around `mean` whose logarithm is normal with deviation `sigma`, between `low` and `high`."""

    mean: float
    sigma: float
    low: int
    high: int

    def draw(self, count: int, rng: random.Random) -> list[int]:
        normal = NormalDist(0.0, self.sigma)
        return _fitted([math.exp(normal.inv_cdf(u)) for u in strata(count, rng)], self.mean, (self.low, self.high))


@dataclass(frozen=True, slots=True)
class WeibullLaw:
    """Whole numbers around `mean` of a Weibull distribution; a `shape` below 1 has a long tail and many short values."""

    mean: float
    shape: float
    low: int
    high: int

    def draw(self, count: int, rng: random.Random) -> list[int]:
        values = [(-math.log1p(-u)) ** (1 / self.shape) for u in strata(count, rng)]
        return _fitted(values, self.mean, (self.low, self.high))


def strata(count: int, rng: random.Random) -> list[float]:
    """`count` numbers in (0, 1), one in each `count`-th of it, shuffled."""
    drawn = [(index + min(max(rng.random(), 1e-9), 1 - 1e-9)) / count for index in range(count)]
    rng.shuffle(drawn)
    return drawn


def _fitted(values: Sequence[float], mean: float, bounds: tuple[int, int]) -> list[int]:
    """`values` times the factor that gives them their mean once they are cut to `bounds` and rounded."""
    low, high = bounds
    factor = mean * len(values) / sum(values)
    for _ in range(20):
        cut = [min(high, max(low, round(value * factor))) for value in values]
        factor *= mean * len(cut) / sum(cut)
    return cut


def poisson_times_s(count: int, rate_per_s: float, rng: random.Random) -> list[float]:
    """Times of a Poisson process."""
    now_s, times_s = 0.0, []
    for _ in range(count):
        times_s.append(now_s)
        now_s += rng.expovariate(rate_per_s)
    return times_s


def burst_times_s(count: int, rate_per_s: float, rng: random.Random, *, period_s: float, dispersion: float) -> list[float]:
    """Times in bursts, one every `period_s`, as a log shows them that is flushed now and then.

    The variance of a burst's size is `dispersion` times its mean.
    """
    shape = rate_per_s * period_s / dispersion
    times_s: list[float] = []
    burst = 0
    while len(times_s) < count:
        size = round(rng.gammavariate(shape, dispersion))
        times_s += [burst * period_s] * min(size, count - len(times_s))
        burst += 1
    return [time_s - times_s[0] for time_s in times_s]


ArrivalLaw = Callable[[int, float, random.Random], list[float]]
