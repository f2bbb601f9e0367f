"""The papers' experiments as simulations: what is varied, what the paper found, and whether ours finds it too.

Absolute seconds do not transfer between machines; orders and shapes do. Each claim is judged on those alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from traces.experiments.dualpath import DUALPATH
from traces.experiments.experiment import Experiment
from traces.experiments.fast25 import BANDWIDTH, PD_RATIO, SCHEDULING
from traces.experiments.fast25_cache import CACHE_CAPACITY, GLOBAL_CACHE, REPLICAS
from traces.experiments.fast25_capacity import CAPACITY
from traces.experiments.overload import OVERLOAD

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {
        each.name: each
        for each in (SCHEDULING, CAPACITY, CACHE_CAPACITY, GLOBAL_CACHE, REPLICAS, BANDWIDTH, PD_RATIO, OVERLOAD, DUALPATH)
    }
)
