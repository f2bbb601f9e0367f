"""What slots are going to have, against a plain list of chains."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.core.expected_prefixes import ExpectedPrefixes
from conductor.core.types import InvariantError

TRUNK = tuple(range(1, 13))
CHAINS = [
    TRUNK,
    TRUNK[:4] + tuple(range(100, 106)),
    TRUNK[:4] + tuple(range(100, 103)) + tuple(range(200, 204)),
    (*TRUNK[:8], 300),
    tuple(range(50, 55)),
]

slots = st.integers(0, 3)
chains = st.builds(lambda chain, count: chain[:count], st.sampled_from(CHAINS), st.integers(1, 12))


def deepest(tree: ExpectedPrefixes, prompt: Sequence[int]) -> dict[int, int]:
    return {slot: depth for slots, depth in tree.depths(prompt) for slot in slots}


class ExpectationsMachine(RuleBasedStateMachine):
    """Any interleaving of what is dispatched, given up, confirmed and expired matches a plain list of chains."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = ExpectedPrefixes()
        self.model: dict[int, dict[tuple[int, ...], list[int]]] = {slot: {} for slot in range(4)}  # chain: [count, until_s]

    @rule(slot=slots, chain=chains, until_s=st.integers(0, 20))
    def add(self, slot: int, chain: tuple[int, ...], until_s: int) -> None:
        self.tree.add(slot, list(chain), until_s)
        entry = self.model[slot].setdefault(chain, [0, 0])
        entry[:] = [entry[0] + 1, max(entry[1], until_s)]

    @rule(slot=slots, chain=chains)
    def discard(self, slot: int, chain: tuple[int, ...]) -> None:
        self.tree.discard(slot, chain[-1])
        entry = self.model[slot].get(chain, [2])
        entry[0] -= 1
        if entry[0] == 0:
            del self.model[slot][chain]

    @rule(slot=slots, data=st.data())
    def confirm(self, slot: int, data: st.DataObject) -> None:
        if self.model[slot]:
            chain = data.draw(st.sampled_from(sorted(self.model[slot])))
            self.tree.confirm(slot, chain[-1])
            del self.model[slot][chain]

    @rule(slot=slots)
    def forget(self, slot: int) -> None:
        self.tree.forget(slot)
        self.model[slot] = {}

    @rule(now=st.integers(0, 20))
    def expire(self, now: int) -> None:
        self.tree.expire(now)
        for slot, entries in self.model.items():
            self.model[slot] = {chain: entry for chain, entry in entries.items() if entry[1] >= now}

    @invariant()
    def depths_equal_those_of_the_list(self) -> None:
        self.tree.check()
        assert bool(self.tree) == any(self.model.values())
        for prompt in [*CHAINS, TRUNK[:6], (*TRUNK, 999), (999,)]:
            found = deepest(self.tree, prompt)
            assert found == {slot: depth for slot, depth in self._depths(prompt) if depth}
        for slot, entries in self.model.items():
            assert sorted(self.tree.ends(slot) or ()) == sorted(chain[-1] for chain in entries)

    def _depths(self, prompt: tuple[int, ...]) -> list[tuple[int, int]]:
        return [(slot, max((common(prompt, chain) for chain in entries), default=0)) for slot, entries in self.model.items()]


def common(prompt: tuple[int, ...], chain: tuple[int, ...]) -> int:
    same = [one == other for one, other in zip(prompt, chain, strict=False)]
    return same.index(False) if False in same else len(same)


TestExpectationsMachine = ExpectationsMachine.TestCase
TestExpectationsMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_nothing_is_left_when_all_is_confirmed() -> None:
    """What was in flight costs no memory afterwards."""
    tree = ExpectedPrefixes()
    for slot, chain in enumerate(CHAINS):
        tree.add(slot, chain, 1.0)
    for slot, chain in enumerate(CHAINS):
        tree.confirm(slot, chain[-1])
    assert not tree
    assert tree._chains == {}


def test_no_prompt_expects_nothing() -> None:
    tree = ExpectedPrefixes()
    tree.add(0, TRUNK, 1.0)
    assert list(tree.depths(())) == []


def test_a_shared_end_of_another_slot_stays() -> None:
    """Giving up what one slot expects leaves what another expects of the same prompt."""
    tree = ExpectedPrefixes()
    tree.add(0, TRUNK, 1.0)
    tree.add(1, TRUNK, 1.0)
    tree.discard(0, TRUNK[-1])
    assert deepest(tree, TRUNK) == {1: len(TRUNK)}


def test_check_notices_damage() -> None:
    """`check` is able to fail."""
    tree = ExpectedPrefixes()
    tree.add(0, TRUNK, 1.0)
    tree._roots[TRUNK[0]].slots[5] = 1
    with pytest.raises(InvariantError, match="I11"):
        tree.check()


def test_twice_expected_is_given_up_twice() -> None:
    """A prompt on its way twice is still expected when one of the two is given up, and as long as the later one may take."""
    tree = ExpectedPrefixes()
    tree.add(0, TRUNK, 1.0)
    tree.add(0, TRUNK, 5.0)
    tree.discard(0, TRUNK[-1])
    tree.discard(0, 12345)
    tree.expire(4.0)
    assert deepest(tree, TRUNK) == {0: len(TRUNK)}
    tree.expire(6.0)
    assert not tree
