"""The keys file: what it says, what is refused, and that keys themselves never show."""

from __future__ import annotations

import json

import pytest

from conductor.gateway.keys import KeysError, Tenant, key_hash, matches, new_key, parse_keys

KEY, OTHER = "k" * 43, "o" * 43  # fixed, because they stand in the names of tests


def test_a_key_finds_its_tenant() -> None:
    """Several keys of one tenant work at once, which is how keys are replaced."""
    ring = parse_keys(f"tenants: {{a: {{keys: ['{key_hash(KEY)}', '{key_hash(OTHER)}']}}}}", "f")
    assert ring.tenant_of(KEY.encode()) == Tenant("a", keys=2)
    assert ring.tenant_of(OTHER.encode()) == Tenant("a", keys=2)
    assert ring.tenant_of(new_key().encode()) is None
    assert ring.tenant_of(b"") is None
    assert len(ring) == 2


def test_limits_are_read_from_yaml_and_json() -> None:
    entry = {"keys": [key_hash(KEY)], "tokens_per_s": 10, "max_in_flight": 3, "weight": 2, "sharing_group": "lab"}
    ring = parse_keys(json.dumps({"tenants": {"a": entry}}), "f")
    expected = Tenant("a", tokens_per_s=10, burst_tokens=600, max_in_flight=3, weight=2, sharing_group="lab", keys=1)
    assert ring.tenants == {"a": expected}


def test_keys_are_long_and_different() -> None:
    assert len({new_key() for _ in range(100)}) == 100
    assert all(len(new_key()) >= 43 for _ in range(10))


def test_a_kept_hash_matches_its_key_alone() -> None:
    assert matches(KEY.encode(), key_hash(KEY))
    assert not matches(OTHER.encode(), key_hash(KEY))


GOOD = key_hash(KEY)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tenants: [", "f is not valid YAML"),
        ("", "allowed"),
        ("tenants: 3", "tenants is 3"),
        ("tenants: {a: {}}", "tenants.a.keys"),
        ("tenants: {a: {keys: []}}", "tenants.a.keys"),
        (f"tenants: {{'a b': {{keys: ['{GOOD}']}}}}", "tenants.a b"),
        (f"tenants: {{'+a': {{keys: ['{GOOD}']}}}}", "tenants.+a"),
        (f"tenants: {{a: {{keys: ['{GOOD}'], weight: 0}}}}", "tenants.a.weight is 0"),
        (f"tenants: {{a: {{keys: ['{GOOD}'], tokens_per_s: -1}}}}", "tenants.a.tokens_per_s is -1"),
        (f"tenants: {{a: {{keys: ['{GOOD}'], max_in_flight: 0}}}}", "tenants.a.max_in_flight is 0"),
        (f"tenants: {{a: {{keys: ['{GOOD}'], wieght: 1}}}}", "tenants.a.wieght"),
        (f"tenants: {{a: {{keys: ['{GOOD}']}}, b: {{keys: ['{GOOD}']}}}}", "'a' and 'b' have a key in common"),
    ],
)
def test_a_wrong_file_is_explained(text: str, expected: str) -> None:
    with pytest.raises(KeysError) as problem:
        parse_keys(text, "f")
    assert expected in str(problem.value)


def test_a_key_in_place_of_its_hash_is_not_repeated() -> None:
    """The commonest mistake must not put a secret into a log."""
    with pytest.raises(KeysError) as problem:
        parse_keys(f"tenants: {{a: {{keys: ['{KEY}']}}}}", "f")
    assert KEY not in str(problem.value)
    assert "conductor key new" in str(problem.value)
