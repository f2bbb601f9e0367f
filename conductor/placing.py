"""Where Ray puts the actors of the workers: each by itself, as evenly as it goes, or all in one placement group.

A worker is one actor, or several stages, which may lie on nodes of their own; each has a bundle of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conductor.connection import actor_environment
from conductor.core.types import Role, WorkerId
from conductor.node_demands import demand_of

if TYPE_CHECKING:  # actors import this module, and need no configuration files
    from conductor.config import Config

WORKER_CONCURRENCY = 4_000


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker to keep running: the class of its actor and what that is made from. `direct_transport`: it moves tensors
    through Ray itself. `stages`: how many actors it is, itself included; it starts the others."""

    id: WorkerId
    role: Role
    threads: int
    actor_class: type
    config: Any
    direct_transport: bool = False
    stages: int = 1


class Placing:
    """After `ray.init`. `life` are the options that say how long the workers live."""

    def __init__(self, config: Config, plans: Sequence[WorkerPlan], life: dict[str, Any]) -> None:
        self._config = config
        self._first_bundles = {plan.id: sum(other.stages for other in plans[:row]) for row, plan in enumerate(plans)}
        self._group = None if config.workers.layout == "each" or not plans else self._create_group(plans, life)

    def _create_group(self, plans: Sequence[WorkerPlan], life: dict[str, Any]) -> Any:
        from ray.util.placement_group import placement_group

        section = self._config.workers
        actors = [(plan, demand_of(plan.role, section)) for plan in plans for _ in range(plan.stages)]
        bundles = [demand.bundle(plan.threads) for plan, demand in actors]
        labels = [demand.labels for _, demand in actors]
        return placement_group(bundles, section.layout.upper(), bundle_label_selector=labels, **life)

    def options(self, plan: WorkerPlan, stage: int = 0) -> dict[str, Any]:
        """What Ray is told of one actor of a worker."""
        demand = demand_of(plan.role, self._config.workers)
        options: dict[str, Any] = {"num_cpus": plan.threads, "max_concurrency": WORKER_CONCURRENCY, "max_restarts": 0}
        if self._group is None:
            options |= demand.options()
            if not demand.labels:  # Ray takes labels or a strategy
                options |= {"scheduling_strategy": "SPREAD"}
        else:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            strategy = PlacementGroupSchedulingStrategy(self._group, self._first_bundles[plan.id] + stage)
            options |= {"resources": demand.resources, "scheduling_strategy": strategy}
        if self._config.cluster.address is not None:  # a local Ray has inherited it, which spares a slow set-up
            options |= {"runtime_env": {"env_vars": actor_environment(plan.threads)}}
        return options

    def stage_options(self, plan: WorkerPlan) -> tuple[dict[str, Any], ...]:
        """Of the later stages. They belong to the first one, and end with it, however long that lives."""
        return tuple(self.options(plan, stage) for stage in range(1, plan.stages))
