"""Where a placement policy comes from, and what is said when it does not."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from conductor import policies_loader
from conductor.core.policies import POLICIES
from conductor.core.policies.baselines import place_random
from conductor.policies_loader import PolicyError, load_policy


def takes_two(situation: object, more: object) -> None:
    """No policy: it wants two arguments."""


def offer(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """As if a package that offers the policy `mine` were installed."""
    points = [EntryPoint("mine", value, policies_loader.GROUP)]
    monkeypatch.setattr(policies_loader, "entry_points", lambda group: points)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_policies_of_the_core_go_by_name(name: str) -> None:
    assert load_policy(name) is POLICIES[name]


def test_a_function_goes_by_its_module() -> None:
    assert load_policy("conductor.core.policies.baselines:place_random") is place_random


def test_an_installed_package_offers_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "conductor.core.policies.baselines:place_random")
    assert load_policy("mine") is place_random


def test_an_entry_point_that_does_not_load_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "no_such_module:place")
    with pytest.raises(PolicyError, match=r"'mine'.*'no_such_module:place'"):
        load_policy("mine")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("fastest", "allowed: conductor, dynamo_cost"),
        ("no_such_module:place", "cannot be imported"),
        ("conductor.core.placement:absent", "has no 'absent'"),
        ("conductor.core.cost_profile:MIN_CALIBRATED_SAMPLES", "it is a int"),
        ("tests.conductor.test_policies_loader:takes_two", "must take one argument"),
        (":place", "with both parts"),
        ("module:", "with both parts"),
    ],
)
def test_a_policy_that_cannot_be_had_is_named_with_the_reason(name: str, complaint: str) -> None:
    with pytest.raises(PolicyError, match=complaint):
        load_policy(name)
