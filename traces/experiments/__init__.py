"""The Mooncake paper's experiments as simulations: what is varied, what the paper found, and whether ours finds it too.

Absolute seconds do not transfer between machines; orders and shapes do. Each claim is judged on those alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from traces.experiments import fast25
from traces.experiments.experiment import Experiment

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {each.name: each for each in (fast25.SCHEDULING, fast25.PD_RATIO, fast25.BANDWIDTH)}
)
