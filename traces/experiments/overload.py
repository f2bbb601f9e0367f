"""Overload in the Mooncake paper (arXiv v3, section 7 and table 3): who is refused, and how the load of both pools swings.

The tool&agent workload on 8 + 8 nodes, at the speed at which the first rule refuses as many as the paper's did: the paper's
"twice the speed" is relative to nodes that were near their limit before, and ours are not. `on_prefill_done` refuses for decode
only after prefill, which is waste; `early` looks at both pools on arrival, and so fills prefill while decode looks idle and
starves it when decode looks full; `predictive` looks at the decode load of the moment when prefill will be done.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from conductor.core.config import SchedulerConfig
from conductor.core.types import SLO
from traces.clusters.profile import load_profile
from traces.experiments.experiment import Claim, Runs, Simulations, Variant, capacity, listed
from traces.outcomes import OutcomeStatus, RunResult
from traces.simulator import SimulationOptions

CLUSTER = "llama3-70b-8xa800"
SPEED = 4.0
OBJECTIVES = SLO(10.0, 0.1)
PAPER_REJECTED = {"on_prefill_done": "18.2 % (4183)", "early": "16.4 % (3771)", "predictive": "15.6 % (3589)"}
TREND_S = 120.0


def _variants() -> Sequence[Variant]:
    cluster = load_profile(CLUSTER)
    return [
        Variant(
            admission,
            SimulationOptions(
                cluster,
                scheduler=SchedulerConfig(
                    block_tokens=cluster.block_tokens, policy="kvcache_centric", admission=admission, slo=OBJECTIVES
                ),
                speed=SPEED,
            ),
            paper,
        )
        for admission, paper in PAPER_REJECTED.items()
    ]


def rejected_share(run: RunResult) -> float:
    return sum(outcome.status is OutcomeStatus.REJECTED for outcome in run.outcomes) / len(run.outcomes)


def wasted_tokens(run: RunResult) -> float:
    return float(sum(outcome.wasted_prefill_tokens for outcome in run.outcomes))


def swing(run: RunResult, pool: str) -> float:
    """Standard deviation of a pool's load around its running mean over two minutes, relative to that mean."""
    load, trend = _load(run, pool)
    return float(np.std(load - trend) / max(float(np.mean(load)), 1e-9)) if load.size else 0.0


def phase(run: RunResult) -> float:
    """Correlation of prefill and decode load around their running means; below 0: one is high while the other is low."""
    prefill, decode = ((load - trend) for load, trend in (_load(run, "prefill_load"), _load(run, "decode_load")))
    if prefill.size < 3 or not (prefill.any() and decode.any()):
        return 0.0
    return float(np.corrcoef(prefill, decode)[0, 1])


def _load(run: RunResult, pool: str) -> tuple[np.ndarray, np.ndarray]:
    """Load while requests arrive, and its running mean."""
    last_s = max(outcome.due_s for outcome in run.outcomes)
    samples = [sample for sample in run.loads if sample.time_s <= last_s]
    if len(samples) < 2:
        return np.zeros(0), np.zeros(0)
    load = np.array([getattr(sample, pool) for sample in samples])
    width = min(len(load), max(1, round(TREND_S / (samples[1].time_s - samples[0].time_s))))
    weights = np.ones(width)
    return load, np.convolve(load, weights, "same") / np.convolve(np.ones(len(load)), weights, "same")


def _judge(runs: Runs) -> Sequence[Claim]:
    shares = [rejected_share(runs[name]) for name in PAPER_REJECTED]
    early, predictive = (swing(runs[name], "decode_load") for name in ("early", "predictive"))
    in_early, in_predictive = phase(runs["early"]), phase(runs["predictive"])
    return [
        Claim(
            "rejections: on_prefill_done > early > predictive",
            shares[0] > shares[1] > shares[2],
            listed(runs, rejected_share),
        ),
        Claim(
            "early rejects before prefill and wastes less of it",
            wasted_tokens(runs["early"]) < wasted_tokens(runs["on_prefill_done"]),
            ", ".join(f"{name} {wasted_tokens(run):,.0f}" for name, run in runs.items()),
        ),
        Claim(
            "loads swing in anti-phase under early, less so under predictive",
            in_early < 0.0 and in_predictive > in_early,
            f"correlation {in_early:.2f}, {in_predictive:.2f}",
        ),
        Claim("decode load swings less under predictive", predictive < early, f"{early:.3f}, {predictive:.3f}"),
    ]


OVERLOAD = Simulations(
    "arxiv-overload",
    "arXiv v3, table 3 and figure 9",
    "toolagent",
    {
        "rejected share": rejected_share,
        "wasted prefill tokens": wasted_tokens,
        "capacity": capacity,
        "prefill swing": partial(swing, pool="prefill_load"),
        "decode swing": partial(swing, pool="decode_load"),
        "phase": phase,
    },
    _variants,
    _judge,
)
