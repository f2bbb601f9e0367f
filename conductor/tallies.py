"""Counters and histograms for one thread: plain numbers on the hot path, Prometheus families at scrape time.

The client library's own metrics take a lock for each increment, since threads may share them; a gateway counts several things
a token on one event loop, so that cost shows. What is exported is the same. Not for use from several threads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Tally(Collector):
    """A counter; `add` takes the label values in the order of `labels`. Without labels it is exported from the start."""

    def __init__(self, name: str, words: str, registry: CollectorRegistry, labels: Sequence[str] = ()) -> None:
        self._name = name
        self._words = words
        self._labels = tuple(labels)
        self._values: defaultdict[tuple[str, ...], float] = defaultdict(float)
        if not labels:
            self._values[()] = 0.0
        registry.register(self)

    def add(self, amount: float, *label_values: str) -> None:
        self._values[label_values] += amount

    @property
    def total(self) -> float:
        return sum(self._values.values())

    def by_label(self, position: int = 0) -> dict[str, float]:
        """Sums for each value of one label."""
        sums: defaultdict[str, float] = defaultdict(float)
        for label_values, value in self._values.items():
            sums[label_values[position]] += value
        return dict(sorted(sums.items()))

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._words, labels=self._labels)
        for label_values, value in sorted(self._values.items()):
            family.add_metric(label_values, value)
        yield family


class Distribution(Collector):
    """A histogram without labels; a value that equals a bound belongs below it."""

    def __init__(self, name: str, words: str, registry: CollectorRegistry, bounds: Sequence[float]) -> None:
        self._name = name
        self._words = words
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._words)
        family.add_metric([], buckets, self._sum)
        yield family
