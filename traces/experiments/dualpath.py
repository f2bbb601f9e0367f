"""DualPath (arXiv 2602.21548): agentic turns whose context lies in a shared store, read through prefill nodes' storage
cards alone, or through decode nodes' idle ones too.

H800 nodes with one 400 Gbps storage card each; the store holds everything, the prefill workers' own pools next to nothing, as
in the paper's set-up without a DRAM cache. The same trajectories arrive ever faster; served means that 90 % of the turns keep
TTFT 4 s and TBT 50 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

from conductor.core.config import SchedulerConfig
from conductor.core.types import SLO
from traces.clusters.profile import ClusterProfile, StorageReads, StorageValues, TierValues, load_profile
from traces.experiments.experiment import Claim, Runs, Simulations, Variant, capacity, mean_ttft_s, token_hit_ratio
from traces.simulator import SimulationOptions

CLUSTER = "llama3-70b-8xh800"
PREFILL, DECODE = 1, 2
STORAGE_BYTES_PER_S = 50e9
STORE = TierValues(bytes_per_s=1e12, blocks=10_000_000)
POOL_BLOCKS = 128
OBJECTIVES = SLO(4.0, 0.05)
SPEEDS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SERVED = 0.9
PAPER_GAIN = 1.96
READS = {"single": StorageReads.PREFILL, "dual": StorageReads.DUAL}


def _cluster(reads: StorageReads) -> ClusterProfile:
    changes = {
        "prefill_blocks": POOL_BLOCKS,
        "tiers": {"shared": STORE},
        "storage": StorageValues(nic_bytes_per_s=STORAGE_BYTES_PER_S, reads=reads),
    }
    return load_profile(CLUSTER).model_copy(update=changes)


def _variants() -> Sequence[Variant]:
    variants = []
    for name, reads in READS.items():
        cluster = _cluster(reads)
        config = SchedulerConfig(block_tokens=cluster.block_tokens, policy="kvcache_centric", admission="none", slo=OBJECTIVES)
        for speed in SPEEDS:
            options = SimulationOptions(cluster, PREFILL, DECODE, scheduler=config, speed=speed)
            variants.append(Variant(f"{name} path, speed {speed:g}", options))
    return variants


def _served_speed(runs: Runs, name: str) -> float:
    """The highest speed up to which the objectives are kept."""
    best = 0.0
    for speed in SPEEDS:
        if capacity(runs[f"{name} path, speed {speed:g}"]) < SERVED:
            break
        best = speed
    return best


def _judge(runs: Runs) -> Sequence[Claim]:
    single, dual = (_served_speed(runs, name) for name in READS)
    gain = dual / single if single else float("inf")
    text = f"both storage paths serve at least 1.3 times the load (paper: {PAPER_GAIN} on average)"
    return [Claim(text, dual > 0 and gain >= 1.3, f"speed {dual:g} against {single:g}: x{gain:.2f}")]


DUALPATH = Simulations(
    "dualpath",
    "arXiv 2602.21548, online serving",
    "dualpath-32k",
    {"capacity": capacity, "mean TTFT, s": mean_ttft_s, "hit ratio, tokens": token_hit_ratio},
    _variants,
    _judge,
)
