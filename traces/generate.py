"""Workloads to generate by name: look-alikes of Mooncake's three traces and DualPath's three agentic ones.

Targets are the published tables. Mooncake's hit ratios are those of table 2 (FAST'25); a replay of the published files comes
out two to three points lower (37 % of the tokens for conversation, 65 % for synthetic). The targets here lie between
the two, within three points of both. The tool&agent workload has two hot system prompts and short outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from traces.agentic import AgenticWorkload, agentic
from traces.laws import LogNormalLaw, WeibullLaw, burst_times_s, poisson_times_s
from traces.lookalike import SystemPrompt, Workload, lookalike
from traces.schema import TraceRequest

THREE_SECOND_BURSTS = partial(burst_times_s, period_s=3.0, dispersion=3.0)

CONVERSATION = Workload(
    name="conversation",
    requests=12_031,
    rate_per_s=3.40,
    arrivals=THREE_SECOND_BURSTS,
    input_tokens=LogNormalLaw(mean=12_035, sigma=1.05, low=600, high=126_195),
    output_tokens=WeibullLaw(mean=343, shape=1.8, low=1, high=2_000),
    system_prompts=(SystemPrompt(blocks=1, share=1.0),),
    token_hit_ratio=0.38,
    reply_s=(5.0, 110.0),
    patience_s=200.0,
    branching=False,
    traffic_class="chat",
)
TOOLAGENT = Workload(
    name="toolagent",
    requests=23_608,
    rate_per_s=6.67,
    arrivals=THREE_SECOND_BURSTS,
    input_tokens=LogNormalLaw(mean=8_596, sigma=0.85, low=3_600, high=126_000),
    output_tokens=WeibullLaw(mean=182, shape=0.7, low=1, high=2_000),
    system_prompts=(SystemPrompt(blocks=7, share=0.6), SystemPrompt(blocks=5, share=0.4)),
    token_hit_ratio=0.59,
    reply_s=(2.0, 60.0),
    patience_s=180.0,
    branching=False,
    traffic_class="agent",
)
SYNTHETIC = Workload(
    name="synthetic",
    requests=3_993,
    rate_per_s=3.91,
    arrivals=poisson_times_s,
    input_tokens=LogNormalLaw(mean=15_325, sigma=0.85, low=100, high=191_378),
    output_tokens=WeibullLaw(mean=149, shape=0.75, low=1, high=2_000),
    system_prompts=(SystemPrompt(blocks=1, share=1.0),),
    token_hit_ratio=0.655,
    reply_s=(1.0, 30.0),
    patience_s=900.0,
    branching=True,
    traffic_class="chat",
)
MOONCAKE_WORKLOADS = (CONVERSATION, TOOLAGENT, SYNTHETIC)

DUALPATH_WORKLOADS = (
    AgenticWorkload("dualpath-32k", 32_768, 60, 608, 148, 28_639, 17_183),
    AgenticWorkload("dualpath-48k", 49_152, 106, 474, 172, 42_607, 25_120),
    AgenticWorkload("dualpath-64k", 65_536, 157, 429, 176, 55_958, 32_721),
)

WORKLOADS: Mapping[str, Workload | AgenticWorkload] = {each.name: each for each in (*MOONCAKE_WORKLOADS, *DUALPATH_WORKLOADS)}


def generate(name: str, requests: int | None = None, seed: int = 0) -> Iterator[TraceRequest]:
    """Requests of the workload `name` in order of time, as many as published unless told; the same seed gives the same ones.

    Raises ValueError for a name that is not in `WORKLOADS`.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload is {name!r}; allowed: {', '.join(WORKLOADS)}")
    workload = WORKLOADS[name]
    if isinstance(workload, AgenticWorkload):
        return agentic(workload, requests or workload.trajectories * workload.turns, seed)
    return lookalike(workload, requests or workload.requests, seed)
