"""DualPath (arXiv 2602.21548): agentic turns whose context lies in a shared store, read through prefill nodes' storage
cards alone, or through decode nodes' idle ones too.

H800 nodes with one 400 Gbps storage card each; the store holds everything, the prefill workers' own pools next to nothing, as
in the paper's set-up without a DRAM cache. The load is how often agents begin, as in the paper: their turns keep the pauses
between them. Served means that 90 % of the turns keep TTFT 4 s and TBT 50 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from conductor.core.config import SchedulerConfig
from conductor.core.types import SLO
from traces.clusters.profile import ClusterProfile, StorageValues, TierValues, load_profile
from traces.experiments.experiment import Claim, Requests, Runs, Simulations, Variant, capacity, mean_ttft_s, token_hit_ratio
from traces.outcomes import RunResult
from traces.simulator import SimulationOptions

CLUSTER = "llama3-70b-8xh800"
PREFILL, DECODE = 1, 2
STORAGE_BYTES_PER_S = 50e9
STORE = TierValues(bytes_per_s=1e12, blocks=10_000_000)
POOL_BLOCKS = 256
OBJECTIVES = SLO(4.0, 0.05)
LOADS = (1.0, 1.5, 2.0, 3.0, 4.0)
TURNS = 12_000
SERVED = 0.9
PAPER_GAIN = 1.96
READS = {"single": "never", "dual": "other_host"}


def _cluster() -> ClusterProfile:
    changes = {
        "prefill_blocks": POOL_BLOCKS,
        "tiers": {"shared": STORE},
        "storage": StorageValues(nic_bytes_per_s=STORAGE_BYTES_PER_S),
    }
    return load_profile(CLUSTER).model_copy(update=changes)


def more_agents(factor: float, trace: Requests) -> Requests:
    """The same trajectories, beginning `factor` times as often."""
    first_s: dict[str | None, float] = {}
    moved = []
    for request in trace:
        begun_s = first_s.setdefault(request.session, request.timestamp_s)
        moved.append(replace(request, timestamp_s=begun_s / factor + request.timestamp_s - begun_s))
    return sorted(moved, key=lambda request: request.timestamp_s)


def _variants() -> Sequence[Variant]:
    variants, cluster = [], _cluster()
    shared = SchedulerConfig(block_tokens=cluster.block_tokens, policy="kvcache_centric", admission="none", slo=OBJECTIVES)
    for name, reads in READS.items():
        config = replace(shared, relayed_reads=reads)
        options = SimulationOptions(cluster, PREFILL, DECODE, scheduler=config)
        variants += [Variant(f"{name} path, load {load:g}", options, reshape=partial(more_agents, load)) for load in LOADS]
    return variants


def storage_busy(run: RunResult) -> float:
    """Bytes that the prefill worker's own storage card has read, over what it could have read."""
    return run.bytes_moved.get("shared_restore", 0) / (STORAGE_BYTES_PER_S * PREFILL * run.duration_s)


def prefill_busy(run: RunResult) -> float:
    return (run.prefill_busy_s or 0.0) / (PREFILL * run.duration_s)


def _served_load(runs: Runs, name: str) -> float:
    """The highest load up to which the objectives are kept."""
    best = 0.0
    for load in LOADS:
        if capacity(runs[f"{name} path, load {load:g}"]) < SERVED:
            break
        best = load
    return best


def _judge(runs: Runs) -> Sequence[Claim]:
    single, dual = (_served_load(runs, name) for name in READS)
    gain = dual / single if single else float("inf")
    text = f"both storage paths serve at least 1.3 times the load (paper: {PAPER_GAIN} on average)"
    most = " (the highest tried)" if dual == LOADS[-1] else ""
    return [Claim(text, dual > 0 and gain >= 1.3, f"load {dual:g}{most} against {single:g}: x{gain:.2f}")]


DUALPATH = Simulations(
    "dualpath",
    "arXiv 2602.21548, online serving",
    "dualpath-32k",
    {
        "capacity": capacity,
        "mean TTFT, s": mean_ttft_s,
        "hit ratio, tokens": token_hit_ratio,
        "own storage card busy": storage_busy,
        "prefill busy": prefill_busy,
    },
    _variants,
    _judge,
    requests=TURNS,
)
