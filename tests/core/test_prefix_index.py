"""The prefix index against a model of sets, and its promises one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.core import prefix_index
from conductor.core.block_map import BlockMap
from conductor.core.prefix_index import AUDIT_EVERY, PrefixIndex
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
        self.index = PrefixIndex(BlockMap(fill=5))
        self.held: dict[Holder, set[int]] = {}
        self.expected: dict[Holder, list[tuple[tuple[int, ...], float]]] = {}
        self.doubted: set[Holder] = set()
        for holder in HOLDERS:
            self.add(holder)
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
        self.doubted.discard(holder)

    @rule(holder=holders)
    def clear(self, holder: Holder) -> None:
        self.index.clear(holder)
        self.doubted.discard(holder)
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

    @rule(holder=holders)
    def doubt(self, holder: Holder) -> None:
        self.index.doubt(holder)
        if holder in self.held:
            self.doubted.add(holder)

    @rule(chain=chains, start=st.integers(0, 11), count=st.integers(1, 12))
    def doubted_holders_remove_without_order(self, chain: tuple[int, ...], start: int, count: int) -> None:
        for holder in sorted(self.doubted, key=str):
            self.index.remove(holder, chain[start : start + count])
            self.held[holder] -= set(chain[start : start + count])

    @rule(first=st.integers(1000, 1100), count=st.integers(1, 40))
    def store_what_nobody_asks_for(self, first: int, count: int) -> None:
        """Other traffic makes the map grow while it is swept."""
        self.index.store(UNCLOSED, None, range(first, first + count))
        self.held[UNCLOSED] |= set(range(first, first + count))

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
            self.doubted.discard(holder)
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
                depth = leading(chain, held)
                expected = [leading(chain, set(blocks)) for blocks, _ in self.expected[holder]]
                assert match.confirmed[self.index.slot(holder)] == depth
                assert match.depths[self.index.slot(holder)] == max([depth, *expected])
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
    chain = tuple(range(1, 257))
    for number in range(1024):
        holder = Holder(f"w{number}", Tier.DEVICE)
        index.add(holder)
        index.store(holder, None, chain[: number // 4 + 1])
    assert index.match(chain).depths.tolist() == [number // 4 + 1 for number in range(1024)]
    for _ in range(2):
        assert index.match(chain[:1]).depths.tolist() == [1] * 1024


def test_an_empty_prompt_matches_nothing() -> None:
    index = PrefixIndex()
    index.add(HOLDERS[0])
    index.store(HOLDERS[0], None, CHAINS[0])
    index.expect(HOLDERS[0], CHAINS[1], 1.0)
    assert index.match(()).depths.tolist() == [0]


def test_holders_that_come_and_go_never_inherit_claims() -> None:
    """A bit is used again only when no block carries it any more, also when the map grows while it is swept."""
    draw = random.Random(7)
    index, top = PrefixIndex(BlockMap(fill=2)), 1
    steady, *others = [Holder(f"w{number}", Tier.DEVICE) for number in range(40)]
    index.add(steady)
    for holder in others:
        index.add(holder)
        for _ in range(draw.randrange(30)):
            index.store(steady, None, range(top, top + 3))
            top += 3
        index.store(holder, None, draw.sample(range(top), min(top, 30)))
        index.discard(holder)
        index.check()


def test_bits_are_used_again() -> None:
    """A holder that restarts for ever does not widen the masks for ever."""
    index = PrefixIndex(BlockMap(fill=4))
    index.add(HOLDERS[0])
    for _ in range(200):
        index.store(HOLDERS[0], None, CHAINS[0])
        index.replace(HOLDERS[0], CHAINS[1])
    assert index._live.bit_length() < 20
    index.check()


def test_a_broken_promise_is_found_out() -> None:
    """A holder that evicts a root before its leaves is matched right after at most 64 matches."""
    chain = tuple(range(1, 200))
    for hole in (1, 2, 31, 32, 33, 64, 100, 197):
        index = PrefixIndex()
        for holder in HOLDERS[:2]:
            index.add(holder)
            index.store(holder, None, chain)
        index.remove(HOLDERS[0], [chain[hole]])
        for _ in range(AUDIT_EVERY**2):
            depths = index.match(chain).depths.tolist()
        assert depths == [hole, len(chain)]
        index.replace(HOLDERS[0], chain)
        assert index.match(chain).depths.tolist() == [len(chain), len(chain)]


def test_an_audit_doubts_nobody_who_keeps_the_promise() -> None:
    """Closed holders of different depths are never walked."""
    index = PrefixIndex()
    chain = tuple(range(1, 101))
    for number, holder in enumerate(HOLDERS):
        index.add(holder)
        index.store(holder, None, chain[: 9 * number + 1])
    for _ in range(AUDIT_EVERY**2):
        index.match(chain)
    assert index._walked == 0


def test_a_holder_in_doubt_is_matched_exactly_at_once() -> None:
    """After a gap in its reports a holder's claims count only as far as they are contiguous."""
    index = PrefixIndex()
    index.add(HOLDERS[0])
    index.store(HOLDERS[0], None, CHAINS[0])
    index.doubt(HOLDERS[0])
    index.remove(HOLDERS[0], [CHAINS[0][3]])
    assert index.match(CHAINS[0]).depths.tolist() == [3]


def test_common_ways_to_part_are_only_a_guess() -> None:
    """Where prompts of one root usually part does not decide where this one does."""
    index = PrefixIndex()
    long, short = HOLDERS[:2]
    for holder in (long, short):
        index.add(holder)
    index.store(long, None, CHAINS[0])
    index.store(short, None, CHAINS[0][:5])
    assert index.match(CHAINS[0]).depths.tolist() == [12, 5]
    index.store(short, CHAINS[0][4], CHAINS[0][5:9])
    assert index.match(CHAINS[0]).depths.tolist() == [12, 9]
    assert index.match(CHAINS[0][:7]).depths.tolist() == [7, 7]
    index.remove(short, CHAINS[0][8:1:-1])
    assert index.match(CHAINS[0]).depths.tolist() == [12, 2]


def test_caches_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses and cached masks are dropped when there are many, and matches stay right."""
    monkeypatch.setattr(prefix_index, "CACHED", 3)
    index = PrefixIndex()
    for number in range(24):
        holder = Holder(f"w{number}", Tier.DEVICE)
        index.add(holder)
        for root in range(1000, 9000, 1000):
            index.store(holder, None, range(root, root + (20 if number < root // 1000 + 8 else 10)))
    for root in [*range(1000, 9000, 1000), *range(1000, 9000, 1000)]:
        wide = root // 1000 + 8
        assert index.match(range(root, root + 30)).depths.tolist() == [20] * wide + [10] * (24 - wide)
        assert len(index._partings) <= 4
        assert len(index._positions) <= 3


def test_equal_reports_give_equal_bytes() -> None:
    """Matching depends on what was reported alone (I7)."""

    def matches() -> list[bytes]:
        index, draw, seen = PrefixIndex(BlockMap(fill=8)), random.Random(3), []
        for step in range(200):
            holder = draw.choice(HOLDERS)
            index.add(holder)
            index.store(holder, None, draw.choice(CHAINS)[: draw.randrange(1, 13)])
            if step % 7 == 0:
                index.discard(draw.choice(HOLDERS))
            seen.append(index.match(draw.choice(CHAINS)).depths.tobytes())
        return seen

    assert matches() == matches()


def test_a_report_ends_the_expectations_that_it_fulfils() -> None:
    """A report ends the expectations that it fulfils and no others (I11)."""
    index = PrefixIndex()
    index.add(HOLDERS[0])
    index.expect(HOLDERS[0], CHAINS[0][:4], 5.0)
    index.expect(HOLDERS[0], CHAINS[1], 5.0)
    index.store(HOLDERS[0], None, CHAINS[0][:3])
    assert index.match(CHAINS[0]).depths.tolist() == [4]
    assert index.match(CHAINS[0]).confirmed.tolist() == [3]
    index.store(HOLDERS[0], CHAINS[0][2], CHAINS[0][3:6])
    assert index.match(CHAINS[0]).depths.tolist() == [6]
    assert index.match(CHAINS[1]).depths.tolist() == [12]
    index.check()


def test_what_is_held_deeper_than_expected_counts_as_deep_as_it_is_held() -> None:
    index = PrefixIndex()
    index.add(HOLDERS[0])
    index.store(HOLDERS[0], None, CHAINS[0][:8])
    index.expect(HOLDERS[0], CHAINS[3], 5.0)
    assert index.match(CHAINS[0]).depths.tolist() == [8]
    assert index.match(CHAINS[3]).depths.tolist() == [12]


def test_reports_about_unknown_holders_change_nothing() -> None:
    index = PrefixIndex()
    index.remove(HOLDERS[0], CHAINS[0])
    index.expect(HOLDERS[0], CHAINS[0], 1.0)
    index.unexpect(HOLDERS[0], CHAINS[0])
    index.doubt(HOLDERS[0])
    index.clear(HOLDERS[0])
    assert index.num_claims(HOLDERS[0]) == 0
    assert index.holders(CHAINS[0][0]) == ()
    index.check()


def test_a_discarded_holder_is_forgotten_at_once_and_swept_later() -> None:
    """Nothing claims the last replica's blocks after it is gone (I8); the memory comes back with later calls."""
    index = PrefixIndex(BlockMap(fill=2))
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


@pytest.mark.parametrize("damage", ["claims", "live", "walked", "expected", "stray"])
def test_check_notices_damage(damage: str) -> None:
    """`check` is able to fail."""
    index = PrefixIndex()
    index.add(HOLDERS[0])
    index.store(HOLDERS[0], None, CHAINS[0])
    if damage == "claims":
        index._slots[HOLDERS[0]].claims += 1
    elif damage == "live":
        index._live |= 1 << 40
    elif damage == "walked":
        index._walked |= 1 << 40
    elif damage == "expected":
        index.expect(HOLDERS[0], CHAINS[1], 1.0)
        index._expected._roots.clear()
    else:
        index._blocks.add([77], 1 << 30, 0)
    with pytest.raises(InvariantError):
        index.check()


@pytest.mark.parametrize("closed", [True, False])
def test_a_doubt_is_cleared_by_trust_unless_closure_was_never_promised(closed: bool) -> None:
    """A hole in a chain is then jumped over by bisection, and never where every block is looked at."""
    index = PrefixIndex()
    index.add(HOLDERS[0], closed=closed)
    index.store(HOLDERS[0], None, CHAINS[0])
    index.doubt(HOLDERS[0])
    index.remove(HOLDERS[0], CHAINS[0][1:2])
    assert index.match(CHAINS[0]).confirmed.max() == 1
    index.trust(HOLDERS[0])
    assert index.match(CHAINS[0]).confirmed.max() == (len(CHAINS[0]) if closed else 1)
