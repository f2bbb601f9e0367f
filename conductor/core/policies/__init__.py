"""The placement policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from conductor.core.placement import Policy
from conductor.core.policies.baselines import place_least_loaded, place_local_cache_aware, place_random, place_round_robin
from conductor.core.policies.conductor import place_conductor
from conductor.core.policies.dynamo_cost import place_dynamo_cost
from conductor.core.policies.kvcache_centric import place_kvcache_centric

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "random": place_random,
        "round_robin": place_round_robin,
        "least_loaded": place_least_loaded,
        "local_cache_aware": place_local_cache_aware,
        "conductor": place_conductor,
        "dynamo_cost": place_dynamo_cost,
        "kvcache_centric": place_kvcache_centric,
    }
)


def policy_named(name: str) -> Policy:
    if name not in POLICIES:
        raise ValueError(f"policy is {name!r}; it must be one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
