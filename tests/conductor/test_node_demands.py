"""From configuration to what Ray is asked for."""

from __future__ import annotations

from conductor.config import load
from conductor.core.types import Role
from conductor.node_demands import demand_of, node_demand


def test_demands_become_options_of_an_actor() -> None:
    """Nothing is asked for where nothing is configured."""
    assert node_demand((), ()).options() == {}
    demand = node_demand(["kv_node=0.5"], ["ray.io/zone=a=b"])
    assert demand.options() == {"resources": {"kv_node": 0.5}, "label_selector": {"ray.io/zone": "a=b"}}
    assert demand.bundle(2) == {"CPU": 2, "kv_node": 0.5}


def test_roles_have_demands_of_their_own() -> None:
    environment = {"CONDUCTOR__WORKERS__PREFILL_LABELS": "[zone=a]", "CONDUCTOR__WORKERS__DECODE_RESOURCES": "[big=1]"}
    section = load(None, environment).config.workers
    assert demand_of(Role.PREFILL, section).options() == {"label_selector": {"zone": "a"}}
    assert demand_of(Role.DECODE, section).options() == {"resources": {"big": 1.0}}
