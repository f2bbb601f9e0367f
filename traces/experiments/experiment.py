"""What an experiment is: rows with the paper's figure beside ours, and claims that hold or do not.

Most are simulations of one trace under several options (`Simulations`); some look at the trace alone (`Analysis`). Each names
the workload that stands in when no trace file is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from conductor.core.types import SLO
from traces.outcomes import RunResult
from traces.schema import TraceRequest
from traces.simulator import SimulationOptions, simulate

Requests: TypeAlias = Sequence[TraceRequest]
Runs: TypeAlias = Mapping[str, RunResult]
Figure: TypeAlias = Callable[[RunResult], float]
Step: TypeAlias = Callable[[str], None]
"""Hears the name of each step as it begins."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One simulation of an experiment. `paper` is the figure that the paper gives for it, as text, or None.

    `reshape`, where given, changes the trace for this simulation alone.
    """

    label: str
    options: SimulationOptions
    paper: str | None = None
    reshape: Callable[[Requests], Requests] | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of the paper that can be judged on our figures, and whether it holds on these."""

    text: str
    holds: bool
    ours: str


@dataclass(frozen=True, slots=True)
class Row:
    """`ours` has a figure for each column of the experiment."""

    label: str
    paper: str | None
    ours: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    columns: tuple[str, ...]
    rows: Sequence[Row]
    claims: Sequence[Claim]


@dataclass(frozen=True, slots=True)
class Simulations:
    """`variants` builds the simulations, `figures` are the columns of the table, `judge` holds the claims against all runs.

    `prepare`, where given, changes the trace first. `requests` is how much of the workload is generated; None is all of it.
    """

    name: str
    source: str
    workload: str
    figures: Mapping[str, Figure]
    variants: Callable[[], Sequence[Variant]]
    judge: Callable[[Runs], Sequence[Claim]]
    prepare: Callable[[Requests], Requests] = lambda trace: trace
    requests: int | None = None

    def steps(self) -> int:
        return len(self.variants())

    def run(self, trace: Requests, step: Step) -> Findings:
        prepared = self.prepare(trace)
        variants = self.variants()
        runs: dict[str, RunResult] = {}
        for variant in variants:
            step(variant.label)
            rows = prepared if variant.reshape is None else variant.reshape(prepared)
            runs[variant.label] = simulate(rows, variant.options)
        table = [
            Row(variant.label, variant.paper, tuple(figure(runs[variant.label]) for figure in self.figures.values()))
            for variant in variants
        ]
        return Findings(tuple(self.figures), table, self.judge(runs))


@dataclass(frozen=True, slots=True)
class Analysis:
    """An experiment on the trace itself."""

    name: str
    source: str
    workload: str
    analyse: Callable[[Requests], Findings]
    requests: int | None = None

    def steps(self) -> int:
        return 1

    def run(self, trace: Requests, step: Step) -> Findings:
        step("analyse")
        return self.analyse(trace)


Experiment: TypeAlias = Simulations | Analysis


def mean_ttft_s(run: RunResult) -> float:
    """Mean TTFT of the requests that completed."""
    return _mean([outcome.ttft_s for outcome in run.outcomes if outcome.ttft_s is not None])


def mean_tbt_s(run: RunResult) -> float:
    """Mean over requests of their mean longest gaps."""
    return _mean([outcome.tbt_s for outcome in run.outcomes if outcome.tbt_s is not None])


def token_hit_ratio(run: RunResult) -> float:
    """Reused share of all prompt tokens."""
    return sum(outcome.reused_tokens or 0 for outcome in run.outcomes) / sum(outcome.input_tokens for outcome in run.outcomes)


def capacity(run: RunResult, slo: SLO | None = None) -> float:
    """Effective request capacity: share of all requests that met both objectives, the run's own unless others are given."""
    objectives = slo or run.slo
    return sum(outcome.meets(objectives) for outcome in run.outcomes) / len(run.outcomes)


def cut_outputs(trace: Requests) -> Requests:
    """The same prompts, each answered by one token."""
    return [replace(request, output_tokens=1) for request in trace]


def listed(runs: Runs, figure: Figure, unit: str = "") -> str:
    """Every run's figure, as text."""
    return ", ".join(f"{label} {figure(run):.3f}{unit}" for label, run in runs.items())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
