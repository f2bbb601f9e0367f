"""Everything that an operator may set about decisions, with its default and its bounds.

The scheduler reads no file and no environment: the edge (`conductor/config.py`) builds these values and hands them in. All of
them are plain numbers and names, so a flight log can carry the configuration that it was made under.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from conductor.core.types import SLO, Priority, WorkerSpec

ADMISSIONS = ("none", "on_prefill_done", "early", "predictive")
RELAYED_READS = ("never", "other_host", "other_worker")


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Late binding: requests wait centrally and reach a prefill worker when it is about to go idle.

    `dispatch_ahead_s` is how long before the predicted end of a worker's work the next request is sent to it.
    `burst_window_s` is how long arrivals are collected before they are assigned together; 0 collects those of one instant.
    Order is by `work_s + aging * arrival time`: after `w / aging` seconds a request overtakes every shorter one by `w` seconds
    of work, so nobody starves; whoever has waited `max_wait_s` goes first whatever its length. A priority class is worth
    `priority_step_s` seconds of work. `max_requests` bounds the queue (None: unbounded), `look_ahead` how many of its head are
    considered at a time.
    """

    dispatch_ahead_s: float = 0.005
    burst_window_s: float = 0.0
    aging: float = 0.03
    max_wait_s: float = 30.0
    priority_step_s: float = 1.0
    max_requests: int | None = None
    look_ahead: int = 64
    pack_backlog: float = 1.0  # requests waiting per worker beyond which short prompts share an engine step
    orphan_wait_s: float = 30.0  # how long a request that no worker may take waits for one, in line or interrupted


@dataclass(frozen=True, slots=True)
class PlacementWeights:
    """What the `conductor` policy charges beside a request's own time; see `policies/conductor.py`."""

    delay: float = 1.0
    copy: float = 0.5
    spread_s: float = 0.02


@dataclass(frozen=True, slots=True)
class MigrationConfig:
    """The background replicator. `budget_bytes_per_s` of 0 turns it off (copies then follow demand alone)."""

    budget_bytes_per_s: float = 0.0
    interval_s: float = 1.0
    heat_half_life_s: float = 60.0
    min_heat: float = 4.0
    max_replicas: int = 4
    tracked_prefixes: int = 4096


@dataclass(frozen=True, slots=True)
class CalibrationConfig:
    """When an estimate may reject: enough recent observations that agree with what was predicted.

    An observation disagrees when the mean of |log(actual / predicted)| exceeds `max_log_error`. `ttl_s` without any observation
    makes the estimate uncalibrated again.
    """

    min_observations: int = 4
    max_log_error: float = 0.5
    ttl_s: float = 300.0
    learning_rate: float = 0.1
    max_correction: float = 20.0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`slo` fills in the objectives that a request leaves open. `kvcache_balancing_threshold` is the one of Algorithm 1.

    `rejection_bias` scales predicted times before they are held against an objective, by priority class: above 1 a class is
    shed early, below 1 it is given the benefit of the doubt. `late_binding` None leaves it to the policy. A snapshot of a cache
    is taken in by pieces of `snapshot_piece_blocks`, so that no decision has to wait for the whole of it. `relayed_reads` says
    for whom a decode worker may read the shared store: for a prefill worker of another host whose own storage link is busy, for
    nobody, or for any prefill worker as if each had a host of its own, which is for tests on one machine.
    """

    block_tokens: int = 64
    policy: str = "conductor"
    admission: str = "early"
    slo: SLO = field(default_factory=SLO)
    kvcache_balancing_threshold: float = 1.5
    allow_pull: bool = True
    relayed_reads: str = "other_host"
    late_binding: bool | None = None
    rejection_bias: Mapping[Priority, float] = field(
        default_factory=lambda: {Priority.HIGH: 0.8, Priority.NORMAL: 1.0, Priority.LOW: 1.25}
    )
    load_threshold: float = 1.0
    max_attempts: int = 4
    resume_timeout_s: float = 60.0
    snapshot_retry_s: float = 2.0
    snapshot_piece_blocks: int = 2048
    decision_records: int = 2048
    seed: int = 0
    weights: PlacementWeights = PlacementWeights()
    queue: QueueConfig = QueueConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    migration: MigrationConfig = MigrationConfig()

    def __post_init__(self) -> None:
        for name, number in _numbers(self):
            _require(0 <= number < math.inf, name, number, "a finite number of at least 0")
        _require(self.block_tokens >= 1, "block_tokens", self.block_tokens, "an integer of at least 1")
        _require(self.admission in ADMISSIONS, "admission", self.admission, f"one of {', '.join(ADMISSIONS)}")
        _require(
            self.kvcache_balancing_threshold >= 1.0,
            "kvcache_balancing_threshold",
            self.kvcache_balancing_threshold,
            "at least 1 (the best holder itself has ratio 1 and must not pull from itself)",
        )
        allowed = f"one of {', '.join(RELAYED_READS)}"
        _require(self.relayed_reads in RELAYED_READS, "relayed_reads", self.relayed_reads, allowed)
        _require(self.max_attempts >= 1, "max_attempts", self.max_attempts, "an integer of at least 1")
        _require(
            self.snapshot_piece_blocks >= 1, "snapshot_piece_blocks", self.snapshot_piece_blocks, "an integer of at least 1"
        )
        _require(self.decision_records >= 0, "decision_records", self.decision_records, "an integer of at least 0")
        _require(self.queue.aging > 0, "queue.aging", self.queue.aging, "more than 0, or long requests could starve")


def require_fit(worker: WorkerSpec, config: SchedulerConfig) -> None:
    """Raises ValueError for a worker that cannot belong to a cluster of this configuration: with blocks of another size its
    reports and its capacity would not mean what they say."""
    size = worker.profile.block_tokens
    _require(
        size == config.block_tokens,
        f"profile.block_tokens of worker {worker.id!r}",
        size,
        f"{config.block_tokens}, as block_tokens is configured",
    )


def _numbers(section: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a section and of those inside it, by its dotted name."""
    for each in fields(section):
        name, value = f"{prefix}{each.name}", getattr(section, each.name)
        if is_dataclass(value):
            yield from _numbers(value, f"{name}.")
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", number) for key, number in value.items())
        elif isinstance(value, int | float):
            yield name, value


def _require(allowed: bool, name: str, value: object, expected: str) -> None:
    if not allowed:
        raise ValueError(f"{name} is {value!r}; it must be {expected}")
