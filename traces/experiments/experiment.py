"""What an experiment is: simulations with labels, the paper's figures beside ours, and claims that hold or do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from traces.outcomes import RunResult
from traces.simulator import SimulationOptions


@dataclass(frozen=True, slots=True)
class Variant:
    """One simulation of an experiment. `paper` is the figure that the paper gives for it, as text, or None."""

    label: str
    options: SimulationOptions
    paper: str | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of the paper that can be judged on simulations, and whether it holds on these."""

    text: str
    holds: bool
    ours: str


Runs: TypeAlias = Mapping[str, RunResult]


@dataclass(frozen=True, slots=True)
class Experiment:
    """`variants` builds the simulations, `figure` is what a table shows of one, `judge` holds the claims against all."""

    name: str
    source: str
    figure_name: str
    variants: Callable[[], Sequence[Variant]]
    figure: Callable[[RunResult], float]
    judge: Callable[[Runs], Sequence[Claim]]


def mean_ttft_s(run: RunResult) -> float:
    """Mean TTFT of the requests that completed."""
    observed = [outcome.ttft_s for outcome in run.outcomes if outcome.ttft_s is not None]
    return sum(observed) / len(observed) if observed else float("nan")


def capacity(run: RunResult) -> float:
    """Effective request capacity: share of all requests that met both objectives."""
    return sum(outcome.meets(run.slo) for outcome in run.outcomes) / len(run.outcomes)
