"""Figures 1, 6 and 7 of the Mooncake paper (FAST'25): requests served within the objectives, and prefill time a request,
disaggregated against coupled engines on as many nodes.

The baselines are vLLM's three modes, each on 16 coupled engines behind a load balancer: plain (whole prompts, nothing reused),
with prefix caching, with chunked prefill. Objectives are the paper's: TTFT 30 s, TBT 100, 200, 300 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from conductor.core.config import SchedulerConfig
from conductor.core.types import SLO
from traces.clusters.profile import load_profile
from traces.experiments.experiment import Claim, Runs, Simulations, Variant, capacity
from traces.experiments.fast25_cache import prefill_s
from traces.outcomes import RunResult
from traces.simulator import SimulationOptions

CLUSTER = "llama3-70b-8xa800"
NODES = 16
TTFT_S = 30.0
TBT_MS = (100, 200, 300)
PAPER_GAIN = {100: "+498 %", 200: "+157 %", 300: "+59 %"}


def _config(block_tokens: int, policy: str) -> SchedulerConfig:
    return SchedulerConfig(block_tokens=block_tokens, policy=policy, admission="none", slo=SLO(TTFT_S, 0.2))


def _disaggregated(policy: str) -> SimulationOptions:
    cluster = load_profile(CLUSTER)
    return SimulationOptions(cluster, NODES // 2, NODES // 2, scheduler=_config(cluster.block_tokens, policy))


def _coupled(*, prefix_cache: bool = False, chunked: bool = False) -> SimulationOptions:
    cluster = load_profile(CLUSTER).model_copy(update={"reuse_blocks": prefix_cache, "chunked_prefill": chunked})
    return SimulationOptions(cluster, 0, 0, NODES, scheduler=_config(cluster.block_tokens, "least_loaded"))


def _variants() -> Sequence[Variant]:
    return [
        Variant("mooncake", _disaggregated("kvcache_centric"), "prefill time x1"),
        Variant("conductor", _disaggregated("conductor")),
        Variant("vllm", _coupled(), "prefill time x1.56"),
        Variant("vllm prefix caching", _coupled(prefix_cache=True), "prefill time x1.43"),
        Variant("vllm chunked prefill", _coupled(chunked=True), "prefill time x1.90"),
    ]


def _within(tbt_ms: int, run: RunResult) -> float:
    return capacity(run, SLO(TTFT_S, tbt_ms / 1000))


def _judge(runs: Runs) -> Sequence[Claim]:
    claims = []
    for tbt_ms in TBT_MS:
        ours, plain = _within(tbt_ms, runs["mooncake"]), _within(tbt_ms, runs["vllm"])
        gain = ours / plain - 1 if plain else float("inf")
        text = f"at TBT {tbt_ms} ms disaggregation serves more than plain vLLM (paper: {PAPER_GAIN[tbt_ms]})"
        claims.append(Claim(text, ours > plain, f"{ours:.1%} against {plain:.1%}, +{gain:.0%}"))
    saved = 1 - prefill_s(runs["mooncake"]) / prefill_s(runs["vllm"])
    claims.append(
        Claim("prefill time a request is at least 25 % below plain vLLM (paper: 36 %)", saved >= 0.25, f"{saved:.1%}")
    )
    return claims


CAPACITY = Simulations(
    "fast25-capacity",
    "FAST'25, figures 1, 6, 7",
    "conversation",
    {
        **{f"capacity, TBT {tbt_ms} ms": partial(_within, tbt_ms) for tbt_ms in TBT_MS},
        "prefill s a request": prefill_s,
    },
    _variants,
    _judge,
)
