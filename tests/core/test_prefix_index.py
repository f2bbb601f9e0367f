"""The prefix index against a model of sets, and its promises one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.core.prefix_index import PrefixIndex
from conductor.core.types import Holder, InvariantError, Tier

HOLDERS = [Holder(f"w{number}", Tier.DEVICE) for number in range(10)] + [Holder("n0", Tier.HOST)]
UNCLOSED = Holder("foreign", Tier.DEVICE)
CHAINS = [tuple(family * 100 + depth for depth in range(12)) for family in range(1, 4)]
CHAINS += [CHAINS[0][:5] + tuple(range(900, 907))]  # a prompt that shares its first five blocks with another

holders = st.sampled_from(HOLDERS)
chains = st.sampled_from(CHAINS)


class IndexMachine(RuleBasedStateMachine):
    """Any interleaving of reports, losses and expectations matches what plain sets say."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(shards=4)
        self.held: dict[Holder, set[int]] = {}
        self.expected: dict[Holder, list[tuple[tuple[int, ...], float]]] = {}
        self.index.add(UNCLOSED, closed=False)
        self.held[UNCLOSED], self.expected[UNCLOSED] = set(), []

    @rule(holder=holders)
    def add(self, holder: Holder) -> None:
        assert self.index.add(holder) == self.index.slot(holder)
        self.held.setdefault(holder, set())
        self.expected.setdefault(holder, [])

    @rule(holder=holders)
    def discard(self, holder: Holder) -> None:
        self.index.discard(holder)
        self.held.pop(holder, None)
        self.expected.pop(holder, None)

    @rule(holder=holders)
    def clear(self, holder: Holder) -> None:
        self.index.clear(holder)
        if holder in self.held:
            self.held[holder], self.expected[holder] = set(), []

    @rule(holder=holders, chain=chains, start=st.integers(0, 11), count=st.integers(1, 12))
    def store(self, holder: Holder, chain: tuple[int, ...], start: int, count: int) -> None:
        if holder not in self.held:
            return
        parent = chain[start - 1] if start else None
        stored = self.index.store(holder, parent, chain[start : start + count])
        assert stored == (parent is None or parent in self.held[holder])
        if stored:
            self._confirm(holder, chain[start : start + count])

    @rule(chain=chains, start=st.integers(0, 11), count=st.integers(1, 12))
    def store_and_remove_without_order(self, chain: tuple[int, ...], start: int, count: int) -> None:
        self.index.store(UNCLOSED, None, chain)
        self.index.remove(UNCLOSED, chain[start : start + count])
        self.held[UNCLOSED] = (self.held[UNCLOSED] | set(chain)) - set(chain[start : start + count])

    @rule(holder=holders, chain=chains, keep=st.integers(0, 11))
    def evict_leaves(self, holder: Holder, chain: tuple[int, ...], keep: int) -> None:
        """Everything that descends from a removed block goes with it, as closed holders promise."""
        gone = set(chain[keep:])
        if keep < 5 and (chain is CHAINS[0] or chain is CHAINS[3]):
            gone |= set(CHAINS[0][keep:]) | set(CHAINS[3][keep:])
        self.index.remove(holder, sorted(gone, reverse=True))
        if holder in self.held:
            self.held[holder] -= gone

    @rule(holder=holders, chain=chains, count=st.integers(0, 12))
    def replace(self, holder: Holder, chain: tuple[int, ...], count: int) -> None:
        if holder in self.held:
            self.index.replace(holder, chain[:count])
            self.held[holder] = set()
            self._confirm(holder, chain[:count])

    @rule(holder=holders, chain=chains, count=st.integers(0, 12), until_s=st.integers(0, 20))
    def expect(self, holder: Holder, chain: tuple[int, ...], count: int, until_s: int) -> None:
        self.index.expect(holder, chain[:count], until_s)
        if holder not in self.held or not count or chain[count - 1] in self.held[holder]:
            return
        same = [until for blocks, until in self.expected[holder] if blocks == chain[:count]]
        longest = max([*same, float(until_s)])
        entries = [(b, longest if b == chain[:count] else until) for b, until in self.expected[holder]]
        self.expected[holder] = [*entries, (chain[:count], longest)]

    @rule(holder=holders, chain=chains, count=st.integers(0, 12))
    def unexpect(self, holder: Holder, chain: tuple[int, ...], count: int) -> None:
        self.index.unexpect(holder, chain[:count])
        for entry in self.expected.get(holder, []):
            if entry[0] == chain[:count]:
                self.expected[holder].remove(entry)
                break

    @rule(now=st.integers(0, 20))
    def expire(self, now: int) -> None:
        self.index.expire(now)
        for holder, entries in self.expected.items():
            self.expected[holder] = [entry for entry in entries if entry[1] >= now]

    @invariant()
    def matches_equal_those_of_sets(self) -> None:
        self.index.check()
        for chain in CHAINS:
            match = self.index.match(chain)
            for holder, held in self.held.items():
                expected = {block for blocks, _ in self.expected[holder] for block in blocks}
                assert match.confirmed[self.index.slot(holder)] == leading(chain, held)
                assert match.depths[self.index.slot(holder)] == leading(chain, held | expected)
        for holder, held in self.held.items():
            assert self.index.num_claims(holder) == len(held)
        block = CHAINS[0][2]
        owners = {holder for holder, held in self.held.items() if block in held}
        assert set(self.index.holders(block)) == owners

    def _confirm(self, holder: Holder, blocks: tuple[int, ...]) -> None:
        self.held[holder] |= set(blocks)
        self.expected[holder] = [entry for entry in self.expected[holder] if entry[0][-1] not in blocks]


def leading(chain: tuple[int, ...], held: set[int]) -> int:
    return next((depth for depth, block in enumerate(chain) if block not in held), len(chain))


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_many_slots_are_matched_at_once() -> None:
    """A thousand holders of different depths are all found in one match."""
    index = PrefixIndex()
    chain = tuple(range(1, 1001))
    for number in range(1000):
        holder = Holder(f"w{number}", Tier.DEVICE)
        index.add(holder)
        index.store(holder, None, chain[: number + 1])
    assert index.match(chain).depths.tolist() == list(range(1, 1001))


def test_a_discarded_holder_is_forgotten_at_once_and_swept_later() -> None:
    """Nothing claims the last replica's blocks after it is gone (I8); the memory comes back with later calls."""
    index = PrefixIndex(shards=8)
    gone, stays = HOLDERS[:2]
    index.add(gone)
    index.add(stays)
    index.store(gone, None, CHAINS[0])
    index.discard(gone)
    assert index.holders(CHAINS[0][0]) == ()
    assert index.match(CHAINS[0]).depths.max() == 0
    for block in range(10_000, 10_008):
        index.store(stays, None, [block])
    assert index.num_blocks == 8
    assert index.add(Holder("next", Tier.DEVICE)) == 0
    index.check()


@pytest.mark.parametrize("damage", ["claims", "live", "expected", "stray"])
def test_check_notices_damage(damage: str) -> None:
    """`check` is able to fail."""
    index = PrefixIndex(shards=2)
    index.add(HOLDERS[0])
    index.store(HOLDERS[0], None, CHAINS[0])
    if damage == "claims":
        index._slots[HOLDERS[0]].claims += 1
    elif damage == "live":
        index._live |= 1 << 40
    elif damage == "expected":
        index.expect(HOLDERS[0], CHAINS[1], 1.0)
        index._expected._roots.clear()
    else:
        index._shards[0][77] = 1 << 30
    with pytest.raises(InvariantError):
        index.check()
