"""Prometheus metrics of a gateway, and of the cluster as its `ClusterStatus` shows it.

Every label has a bounded set of values: endpoints and reasons come from fixed lists, workers from the cluster. The registry is
the gateway's own, so two gateways in one process do not mix. Worker and cluster figures are read at scrape time and
exported as `conductor_worker_<figure>` and `conductor_cluster_<figure>`, whatever the runtime chooses to report.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.core.types import TTFTEstimate
from conductor.engine_client import ClusterStatus
from conductor.tallies import Distribution, Tally

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TBT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 4.0, 10.0)
WORD_LABELS = ("role", "node", "state", "model")


class GatewayMetrics:
    """What the gateway counts. All methods are cheap enough to be called for every token; `in_flight` and `waiting` are plain
    numbers that others keep and a scrape reads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = self.registry
        self._requests = Tally("conductor_requests", "Answers by endpoint and status", own, ["endpoint", "code"])
        self._rejections = Tally("conductor_rejections", "Refused by the scheduler or the gateway", own, ["reason"])
        self._cancels = Tally("conductor_cancels", "Generations cancelled by the gateway", own)
        self._ttft = Distribution("conductor_ttft_seconds", "Submission to first token", own, TTFT_BUCKETS_S)
        self._tbt = Distribution("conductor_tbt_seconds", "Between two tokens", own, TBT_BUCKETS_S)
        self._ratio = Distribution("conductor_ttft_estimate_ratio", "Actual over predicted TTFT", own, RATIO_BUCKETS)
        self._error = Distribution("conductor_ttft_estimate_error_seconds", "|actual - predicted| TTFT", own, TTFT_BUCKETS_S)
        self._predicted = Distribution("conductor_predicted_ttft_seconds", "TTFT promised at placement", own, TTFT_BUCKETS_S)
        self._reuse = ReuseTallies(own)
        self._tenant_tokens = Tally("conductor_tenant_tokens", "Tokens by tenant and kind", own, ["tenant", "kind"])
        self._prompt_tokens = Tally("conductor_prompt_tokens", "Tokens of prompts", own)
        self._hit_tokens = Tally("conductor_prompt_hit_tokens", "Tokens of prompts answered from cache", own)
        self._output_tokens = Tally("conductor_output_tokens", "Generated tokens", own)
        self.in_flight = 0
        self.waiting = 0
        in_flight = Gauge("conductor_requests_in_flight", "Generations in progress at this gateway", registry=own)
        in_flight.set_function(lambda: self.in_flight)
        waiting = Gauge("conductor_requests_waiting", "Generations without a first token yet", registry=own)
        waiting.set_function(lambda: self.waiting)
        self.waiting_for_turn: Callable[[], int] = lambda: 0
        room = Gauge("conductor_requests_waiting_for_turn", "Requests in the gateway's waiting room", registry=own)
        room.set_function(lambda: self.waiting_for_turn())
        self._cluster = ClusterFigures()
        own.register(self._cluster)

    def answered(self, endpoint: str, status: int) -> None:
        self._requests.add(1, endpoint, str(status))

    def rejected(self, reason: str) -> None:
        self._rejections.add(1, reason)

    def cancelled(self) -> None:
        self._cancels.add(1)

    def first_token(self, ttft_s: float, predicted: TTFTEstimate | None) -> None:
        """A first token came `ttft_s` after submission; estimates of an uncalibrated model are not judged."""
        self._ttft.observe(ttft_s)
        if predicted is not None and predicted.calibrated and predicted.total_s > 0:
            self._predicted.observe(predicted.total_s)
            self._ratio.observe(ttft_s / predicted.total_s)
            self._error.observe(abs(ttft_s - predicted.total_s))

    def reuse(self, worker: str, predicted_tokens: int, actual_tokens: int) -> None:
        """What the index promised of a worker's cache for one request, and what was found there."""
        self._reuse.book(worker, predicted_tokens, actual_tokens)

    def tenant_tokens(self, tenant: str, prompt: int, output: int) -> None:
        """Totals of one request when it ends; tenants come from the keys file, so their number is bounded."""
        self._tenant_tokens.add(prompt, tenant, "prompt")
        self._tenant_tokens.add(output, tenant, "output")

    def next_token(self, tbt_s: float) -> None:
        self._tbt.observe(tbt_s)

    def tokens(self, prompt: int, hit: int, output: int) -> None:
        """Totals of one request when it ends."""
        self._prompt_tokens.add(prompt)
        self._hit_tokens.add(hit)
        self._output_tokens.add(output)

    def figures(self) -> dict[str, object]:
        """What people who watch want to see, as JSON values: gauges as they stand, counters since the start."""
        return {
            "in_flight": self.in_flight,
            "waiting_for_first_token": self.waiting,
            "waiting_for_turn": self.waiting_for_turn(),
            "answers": self._requests.by_label(1),
            "rejections": self._rejections.by_label(),
            "cancels": self._cancels.total,
            "prompt_tokens": self._prompt_tokens.total,
            "prompt_hit_tokens": self._hit_tokens.total,
            "output_tokens": self._output_tokens.total,
        }

    def exposition(self, status: ClusterStatus | None) -> bytes:
        """The text of `/metrics`; `status` None says that the cluster did not answer."""
        self._cluster.status = status
        return generate_latest(self.registry)


class ReuseTallies:
    """How well the prefix index knows each worker's cache, in tokens: precision is confirmed over predicted, recall is
    confirmed over actual, and confirmed is the smaller of the two for each request."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "conductor_index_{}_tokens"
        self._predicted, self._actual, self._confirmed = (
            Tally(name.format(kind), words, registry, ["worker"])
            for kind, words in (
                ("predicted", "Prompt tokens that a placement expected to reuse"),
                ("actual", "Prompt tokens that were reused"),
                ("confirmed", "Prompt tokens that were expected and reused"),
            )
        )

    def book(self, worker: str, predicted_tokens: int, actual_tokens: int) -> None:
        self._predicted.add(predicted_tokens, worker)
        self._actual.add(actual_tokens, worker)
        self._confirmed.add(min(predicted_tokens, actual_tokens), worker)


class ClusterFigures(Collector):
    """The numbers of the last `ClusterStatus` as gauges."""

    def __init__(self) -> None:
        self.status: ClusterStatus | None = None

    def collect(self) -> Iterator[Metric]:
        status = self.status
        ready = bool(status and status.ready)
        yield GaugeMetricFamily("conductor_ready", "1 when the cluster takes requests", value=float(ready))
        if status is None:
            return
        for name, value in sorted(status.counters.items()):
            yield GaugeMetricFamily(f"conductor_cluster_{metric_name(name)}", f"Cluster figure {name}", value=value)
        yield worker_info(status.workers)
        yield from worker_figures(status.workers)
        yield from link_figures(status.workers)


def worker_info(workers: Mapping[str, Mapping[str, object]]) -> Metric:
    info = GaugeMetricFamily("conductor_worker_info", "Workers that the cluster knows", labels=["worker", *WORD_LABELS])
    for worker, figures in sorted(workers.items()):
        info.add_metric([worker, *(str(figures.get(word, "")) for word in WORD_LABELS)], 1.0)
    return info


def worker_figures(workers: Mapping[str, Mapping[str, object]]) -> Iterable[Metric]:
    """One gauge family for each numeric figure that any worker reports."""
    by_figure: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for worker, figures in sorted(workers.items()):
        for name, value in figures.items():
            if isinstance(value, int | float):
                by_figure[metric_name(name)].append((worker, float(value)))
    for name, values in sorted(by_figure.items()):
        family = GaugeMetricFamily(f"conductor_worker_{name}", f"Worker figure {name}", labels=["worker"])
        for worker, value in values:
            family.add_metric([worker], value)
        yield family


LINK_FIGURES = {"bytes_per_s": "Measured bandwidth of a link", "latency_s": "Measured latency of a link"}


def link_figures(workers: Mapping[str, Mapping[str, Any]]) -> Iterable[Metric]:
    """What KV really comes over, from each peer to each worker."""
    for figure, words in LINK_FIGURES.items():
        family = GaugeMetricFamily(f"conductor_link_{figure}", words, labels=["worker", "source", "transport"])
        for worker, figures in sorted(workers.items()):
            for source, link in figures.get("links", {}).items():
                family.add_metric([worker, source, link["transport"]], link[figure])
        yield family


def metric_name(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name).lower()
