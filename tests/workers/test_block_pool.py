"""The block pool against a brute-force model, and its rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from conductor.core.types import InvariantError
from workers.block_pool import BlockPool, OutOfBlocks, Removed, Stored


def chain(branch: int, depth: int) -> tuple[int, ...]:
    """A prefix of `depth` blocks; branches share their first two blocks."""
    return tuple(level if level <= 2 else 100 * branch + level for level in range(1, depth + 1))


def fill(pool: BlockPool, hashes: tuple[int, ...]) -> list[int]:
    """Pin the cached prefix of `hashes`, allocate and name the rest, as a sequence does."""
    ids = pool.acquire(hashes)
    fresh = pool.allocate(len(hashes) - len(ids))
    assert not isinstance(fresh, OutOfBlocks)
    for block in fresh:
        depth = len(ids)
        ids.append(pool.commit(block, hashes[depth], hashes[depth - 1] if depth else None))
    return ids


def test_nothing_is_cached_at_first() -> None:
    """A fresh pool is free from end to end."""
    pool = BlockPool(4)
    assert (pool.free, pool.idle, pool.pinned, pool.match((1, 2))) == (4, 0, 0, 0)


def test_a_released_prefix_is_found_again() -> None:
    """Named blocks stay after their sequence has gone, and the longest match is contiguous from block 0 (I4)."""
    pool = BlockPool(4)
    pool.release(fill(pool, (1, 2, 3)))
    assert pool.match((1, 2, 3, 4)) == 3
    assert pool.match((9, 2, 3)) == 0
    assert (pool.free, pool.idle) == (1, 3)


def test_partial_blocks_are_forgotten() -> None:
    """A block without a name is free again as soon as it is released."""
    pool = BlockPool(2)
    ids = pool.allocate(2)
    assert ids == [0, 1]
    pool.release([0, 1])
    assert pool.free == 2


def test_leaves_go_before_roots() -> None:
    """Eviction takes the end of a prefix first, although all of it was used at the same time."""
    pool = BlockPool(3)
    pool.release(fill(pool, (1, 2, 3)))
    pool.drain_changes()
    pool.allocate(2)
    assert [Removed((3, 2))] == pool.drain_changes()
    assert pool.match((1, 2, 3)) == 1


def test_the_least_recently_used_leaf_goes_first() -> None:
    """Of two branches, the one that was used longer ago loses its leaf."""
    pool = BlockPool(4)
    for hashes in (chain(1, 3), chain(2, 3), chain(1, 3)):
        pool.release(fill(pool, hashes))
    pool.drain_changes()
    pool.allocate(1)
    assert [Removed((203,))] == pool.drain_changes()
    assert (pool.match(chain(1, 3)), pool.match(chain(2, 3))) == (3, 2)


def test_demoted_blocks_go_first() -> None:
    """Advice to drop a prefix outweighs how recently it was used."""
    pool = BlockPool(4)
    pool.release(fill(pool, (1, 2)))
    pool.release(fill(pool, (5, 6)))
    pool.demote((5, 6, 77))
    pool.allocate(2)
    assert (pool.match((1, 2)), pool.match((5, 6))) == (2, 0)


def test_pinned_blocks_survive() -> None:
    """What a sequence holds is never evicted (I3); asking for more than there is takes nothing."""
    pool = BlockPool(3)
    fill(pool, (1, 2))
    assert OutOfBlocks(needed=2, available=1) == pool.allocate(2)
    assert (pool.match((1, 2)), pool.free) == (2, 1)


def test_one_block_per_name() -> None:
    """Two sequences that computed the same block share the first one; the second copy is free again."""
    pool = BlockPool(4)
    first = fill(pool, (1,))
    fresh = pool.allocate(1)
    assert fresh == [1]
    assert first[0] == pool.commit(1, 1, None)
    assert pool.free == 3


def test_changes_tell_runs_with_their_parent() -> None:
    """Blocks that follow each other are reported together, with the hash before the first."""
    pool = BlockPool(4)
    fill(pool, (1, 2))
    fill(pool, (1, 2, 3))
    fill(pool, (9,))
    assert [Stored(None, (1, 2, 3)), Stored(None, (9,))] == pool.drain_changes()
    assert pool.drain_changes() == []


def test_everything_cached_is_listed_after_its_parent() -> None:
    """A snapshot lists roots before what follows them."""
    pool = BlockPool(8)
    fill(pool, chain(1, 4))
    fill(pool, chain(2, 4))
    listed = pool.cached()
    assert {*chain(1, 4), *chain(2, 4)} == set(listed)
    assert all(listed.index(a) < listed.index(b) for a, b in ((1, 2), (2, 103), (103, 104), (2, 203)))


def test_evicting_what_is_idle_spares_what_is_pinned() -> None:
    """Clearing the cache forgets all idle blocks, however deep."""
    pool = BlockPool(6)
    held = fill(pool, (1, 2))
    pool.release(fill(pool, (1, 2, 3, 4)))
    assert pool.evict_idle() == 2
    assert (pool.match((1, 2, 3)), pool.idle, pool.free) == (2, 0, 4)
    pool.release(held)


def test_misuse_is_a_bug() -> None:
    """Releasing twice, pinning a free block or naming an orphan breaks an invariant and says so."""
    pool = BlockPool(2)
    with pytest.raises(InvariantError, match="released more often"):
        pool.release([0])
    with pytest.raises(InvariantError, match="cannot be pinned"):
        pool.retain([0])
    pool.allocate(1)
    with pytest.raises(InvariantError, match="closure"):
        pool.commit(0, 7, 6)
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


class PoolMachine(RuleBasedStateMachine):
    """Sequences come and go over few blocks; a plain model remembers references and what was reported."""

    @initialize(num_blocks=st.integers(1, 9), window_blocks=st.integers(0, 3))
    def start(self, num_blocks: int, window_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, window_blocks)
        self.window_blocks = window_blocks
        self.bare: set[int] = set()
        self.tables: list[list[int]] = []
        self.reported: dict[int, int | None] = {}

    def reusable(self, hashes: tuple[int, ...]) -> bool:
        return all(name in self.reported for name in hashes) and not self.bare & set(hashes[::-1][: self.window_blocks])

    @rule(branch=st.integers(1, 3), depth=st.integers(1, 6), partial=st.integers(0, 2), bare=st.integers(0, 6))
    def begin(self, branch: int, depth: int, partial: int, bare: int) -> None:
        """`bare` of the blocks come from elsewhere without window state."""
        hashes = chain(branch, depth)
        longest = max(k for k in range(depth + 1) if self.reusable(hashes[:k]))
        assert longest == self.pool.match(hashes)
        ids = self.pool.acquire(hashes)
        assert longest == len(ids)
        pinned = {block for table in self.tables for block in table} | set(ids)
        need = depth - len(ids) + partial
        fresh = self.pool.allocate(need)
        if isinstance(fresh, OutOfBlocks):
            assert self.pool.num_blocks - len(pinned) == fresh.available < need
            self.pool.release(ids)
            return
        assert pinned.isdisjoint(fresh)
        self._follow_reports()  # what had to go for these is not bare any more
        for position in range(len(ids), depth):
            block, name = fresh.pop(0), hashes[position]
            if position >= bare and self.pool.bare(name) is not None:
                self.pool.mend(name)
            elif position < bare and name not in self.pool.cached():
                self.bare.add(name)
            ids.append(self.pool.commit(block, name, hashes[position - 1] if position else None, bare=position < bare))
            if position >= bare:
                self.bare.discard(name)
        self.tables.append(ids + fresh)

    @rule(pick=st.integers(0, 99))
    def end(self, pick: int) -> None:
        if self.tables:
            self.pool.release(self.tables.pop(pick % len(self.tables)))

    @rule(branch=st.integers(1, 3), depth=st.integers(1, 6))
    def demote(self, branch: int, depth: int) -> None:
        self.pool.demote(chain(branch, depth))

    @rule()
    def clear(self) -> None:
        idle = self.pool.idle
        assert idle == self.pool.evict_idle()

    @invariant()
    def pool_is_consistent(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        self._follow_reports()
        assert set(self.reported) == set(self.pool.cached())
        assert self.bare == {name for name in self.reported if self.pool.bare(name) is not None}
        assert len({block for table in self.tables for block in table}) == self.pool.pinned

    def _follow_reports(self) -> None:
        """Removals never orphan a block: what the reports say is closed at every step."""
        for change in self.pool.drain_changes():
            if isinstance(change, Removed):
                for name in change.blocks:
                    del self.reported[name]
                    self.bare.discard(name)
                    assert name not in self.reported.values()
                continue
            parent = change.parent
            for name in change.blocks:
                assert parent is None or parent in self.reported
                assert name not in self.reported
                self.reported[name] = parent
                parent = name


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40)
