"""Experiments of the Mooncake paper (FAST'25, sections 5.3 and 5.4) about the cache: its size, its reach, its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from conductor.core.config import SchedulerConfig
from conductor.core.types import SLO
from traces.clusters.profile import load_profile
from traces.experiments.experiment import (
    Analysis,
    Claim,
    Findings,
    Requests,
    Row,
    Runs,
    Simulations,
    Variant,
    cut_outputs,
    mean_ttft_s,
    token_hit_ratio,
)
from traces.outcomes import RunResult
from traces.schema import MOONCAKE_BLOCK_TOKENS
from traces.simulator import SimulationOptions
from traces.stats import StatsOptions, collect

CLUSTER = "llama3-70b-8xa800"
MILLION = 1_000_000
CAPACITIES_MILLION_TOKENS = (1, 3, 10, 30, 50)
PAPER_SHARE = {3: "41 % of max", 50: "about max"}
GLOBAL_CACHE_NODES = 10
REPLICATION_NODES = 8
NODES = 16
REPLICA_RANKS = (10, 100, 1_000, 10_000)


def _cache_capacity(trace: Requests) -> Findings:
    blocks = tuple(tokens * MILLION // MOONCAKE_BLOCK_TOKENS for tokens in CAPACITIES_MILLION_TOKENS)
    reuse = collect(trace, StatsOptions(capacities_blocks=blocks, policies=())).reuse
    if reuse is None:
        raise ValueError("the trace has no prefix identity; allowed: a trace with hash_ids")
    most = reuse.token_hit_ratio
    ratios = [point.token_hit_ratio or 0.0 for point in reuse.capacities]
    rows = [
        Row(f"{tokens}M tokens", PAPER_SHARE.get(tokens), (ratio, ratio / most))
        for tokens, ratio in zip(CAPACITIES_MILLION_TOKENS, ratios, strict=True)
    ]
    node, cluster = (ratios[CAPACITIES_MILLION_TOKENS.index(tokens)] / most for tokens in (3, 50))
    claims = [
        Claim("one node's 3M tokens reach less than half of the maximum (paper: 41 %)", node < 0.5, f"{node:.1%}"),
        Claim("50M tokens reach over 98 % of the maximum", cluster > 0.98, f"{cluster:.1%}"),
    ]
    return Findings(("LRU hit ratio, tokens", "share of maximum"), [*rows, Row("infinite", None, (most, 1.0))], claims)


def _options(policy: str, prefill: int, decode: int, *, pulls: bool) -> SimulationOptions:
    cluster = load_profile(CLUSTER)
    config = SchedulerConfig(
        block_tokens=cluster.block_tokens, policy=policy, admission="none", slo=SLO(30.0, 0.2), allow_pull=pulls
    )
    return SimulationOptions(cluster, prefill, decode, scheduler=config)


def _global_cache() -> Sequence[Variant]:
    return [
        Variant("local", _options("least_loaded", GLOBAL_CACHE_NODES, 1, pulls=False), "hits 17 %"),
        Variant("global", _options("kvcache_centric", GLOBAL_CACHE_NODES, 1, pulls=True), "hits 38 %, GPU time x0.76"),
        Variant("conductor", _options("conductor", GLOBAL_CACHE_NODES, 1, pulls=True)),
    ]


def prefill_s(run: RunResult) -> float:
    """Accelerator time of prefill, per request."""
    return (run.prefill_busy_s or 0.0) / len(run.outcomes)


def _judge_global_cache(runs: Runs) -> Sequence[Claim]:
    hits = {label: token_hit_ratio(run) for label, run in runs.items()}
    gain = hits["global"] / hits["local"] if hits["local"] else float("inf")
    saved = prefill_s(runs["global"]) / prefill_s(runs["local"])
    return [
        Claim("a global cache at least doubles the hits of local ones (paper: x2.22)", gain >= 2.0, f"x{gain:.2f}"),
        Claim("and takes at most 0.85 of their prefill time (paper: x0.76)", saved <= 0.85, f"x{saved:.2f}"),
    ]


def most_holders(rank: int, run: RunResult) -> float:
    """Prefill workers that held the block of that rank at the moment when most did."""
    return float(max(run.holders.get(rank, (0,))))


def mean_holders(rank: int, run: RunResult) -> float:
    held = run.holders.get(rank, (0,))
    return sum(held) / len(held)


def _replication() -> Sequence[Variant]:
    papers = {"kvcache_centric": "10th block about 8, 100th about 7, 10,000th 0 to 3", "conductor": None}
    return [
        Variant(
            policy,
            replace(_options(policy, REPLICATION_NODES, NODES - REPLICATION_NODES, pulls=True), count_replicas=True),
            paper,
        )
        for policy, paper in papers.items()
    ]


def _judge_replication(runs: Runs) -> Sequence[Claim]:
    run = runs["kvcache_centric"]
    hot, warm, cold = (most_holders(rank, run) for rank in (10, 100, 10_000))
    means = [mean_holders(rank, run) for rank in REPLICA_RANKS]
    text = f"10th: {hot:.0f}, 100th: {warm:.0f}, 10,000th: {cold:.0f}"
    return [
        Claim(
            "the 10th and the 100th block come to lie on most of the prefill workers (paper: 8 and 7 of 8)",
            min(hot, warm) > REPLICATION_NODES / 2,
            text,
        ),
        Claim(
            "replicas fall with the rank, on average over time; the 10,000th block has 3 at most",
            means == sorted(means, reverse=True) and cold <= 3,
            ", ".join(f"{mean:.1f}" for mean in means),
        ),
    ]


CACHE_CAPACITY = Analysis("fast25-cache-capacity", "FAST'25, figure 9", "conversation", _cache_capacity)
GLOBAL_CACHE = Simulations(
    "fast25-global-cache",
    "FAST'25, figure 10",
    "conversation",
    {"hit ratio, tokens": token_hit_ratio, "prefill s a request": prefill_s, "mean TTFT, s": mean_ttft_s},
    _global_cache,
    _judge_global_cache,
    prepare=cut_outputs,
)
REPLICAS = Simulations(
    "fast25-replicas",
    "FAST'25, figure 11",
    "conversation",
    {
        **{f"most, {rank}th": partial(most_holders, rank) for rank in REPLICA_RANKS},
        **{f"mean, {rank}th": partial(mean_holders, rank) for rank in REPLICA_RANKS},
    },
    _replication,
    _judge_replication,
)
