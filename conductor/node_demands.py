"""What an actor asks of the node that it runs on, from configuration to Ray's words, without Ray.

A demand is `name=amount` of a custom resource, or `label=value` that the node carries. Workers are laid over nodes either each
by itself, as evenly as it goes (`each`), or all together as one placement group with a strategy of Ray's: `pack`, `spread`,
`strict_pack`, `strict_spread`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conductor.core.types import Role


@dataclass(frozen=True, slots=True)
class NodeDemand:
    """Custom resources and labels that a node must have."""

    resources: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """As options of an actor."""
        options: dict[str, Any] = {"resources": self.resources} if self.resources else {}
        return options | ({"label_selector": self.labels} if self.labels else {})

    def bundle(self, cpus: float) -> dict[str, float]:
        """As a bundle of a placement group; labels go beside it."""
        return {"CPU": cpus, **self.resources}


def node_demand(resources: Sequence[str], labels: Sequence[str]) -> NodeDemand:
    """From `name=amount` and `label=value`, which the configuration has checked."""
    amounts = (text.split("=", 1) for text in resources)
    values = (text.split("=", 1) for text in labels)
    return NodeDemand({name: float(amount) for name, amount in amounts}, {name: value for name, value in values})


def demand_of(role: Role, section: Any) -> NodeDemand:
    """Of a worker with this role; `section` is the configuration's `workers`."""
    if role is Role.DECODE:
        return node_demand(section.decode_resources, section.decode_labels)
    return node_demand(section.prefill_resources, section.prefill_labels)
