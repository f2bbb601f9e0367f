"""Experiments of the paper: what they vary and how they judge."""

from dataclasses import replace

import pytest

from tests.traces.sim_builders import row
from traces.experiments import EXPERIMENTS
from traces.outcomes import RunResult
from traces.simulator import simulate

TRACE = [row(number * 0.2, 3000, output=3, first_block=1000 * (number % 5)) for number in range(20)]


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_every_variant_runs_and_every_claim_is_judged(name: str) -> None:
    """On a small trace; whether claims hold there does not matter."""
    experiment = EXPERIMENTS[name]
    runs = {variant.label: simulate(TRACE, variant.options) for variant in experiment.variants()}
    assert all(experiment.figure(run) > 0 for run in runs.values())
    assert all(claim.ours for claim in experiment.judge(runs))


def slower(run: RunResult, factor: float) -> RunResult:
    return replace(run, outcomes=[replace(outcome, ttft_s=outcome.ttft_s * factor) for outcome in run.outcomes])


@pytest.mark.parametrize(("factors", "ordered", "gain"), [((6, 2, 1.2, 1), True, True), ((6, 1, 2, 1.95), False, False)])
def test_scheduling_claims_follow_the_measured_order(factors: tuple[float, ...], ordered: bool, gain: bool) -> None:
    """random > load balancing > local cache-aware > global, the last two at least 5 % apart."""
    experiment = EXPERIMENTS["fast25-scheduling"]
    names = ("random", "least_loaded", "local_cache_aware", "kvcache_centric")
    run = simulate(TRACE, experiment.variants()[0].options)
    runs = {name: slower(run, factor) for name, factor in zip(names, factors, strict=True)}
    assert [claim.holds for claim in experiment.judge(runs)][:2] == [ordered, gain]
