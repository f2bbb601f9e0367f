"""Block caches of simulated workers."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from conductor.core.types import Tier
from traces.sim.cache import BlockCache
from traces.sim.links import Link
from traces.sim.worker import TierStore

# Prompts as paths in a small tree: block id = the path so far, so equal ids mean equal prefixes.
paths = st.lists(st.integers(0, 2), min_size=1, max_size=5)


def blocks_of(path: Sequence[int]) -> list[int]:
    names = []
    name = 1
    for step in path:
        name = name * 3 + step
        names.append(name)
    return names


@given(st.lists(st.tuples(paths, st.booleans()), max_size=40))
def test_pool_keeps_its_bounds_and_holds_every_block_with_its_ancestors(uses: list[tuple[list[int], bool]]) -> None:
    """I2, I3, I4: used and free room add up, pins are never evicted, eviction takes leaves before roots."""
    cache = BlockCache(8)
    kept: list[list[int]] = []
    for path, keep in uses:
        blocks = blocks_of(path)
        if len(blocks) > cache.free_blocks:
            continue
        matched = cache.match(blocks)
        cache.pin(blocks[:matched])
        added, evicted = cache.store(blocks[matched:])
        assert blocks[matched:] == added
        assert not any(block in pinned for pinned in kept for block in evicted)
        if keep and len(kept) < 1:
            kept.append(blocks)
        else:
            cache.unpin(blocks)
        assert len(cache) <= cache.capacity_blocks
        for block in cache.contents():
            assert block < 9 or (block // 3) in cache


def test_least_recently_used_prefix_goes_first_from_its_tail() -> None:
    """Three blocks of an older prompt make room for two of a newer one: its last two go."""
    cache = BlockCache(5)
    for blocks in ((1, 2, 3), (10, 11)):
        cache.store(blocks)
        cache.unpin(blocks)
    assert cache.store((20, 21)) == ([20, 21], [3, 2])
    assert cache.match((1, 2, 3)) == 1


def test_dropped_blocks_are_evicted_before_older_ones() -> None:
    """Advice to drop a leaf is taken; a block with children stays behind its children."""
    cache = BlockCache(5)
    for blocks in ((1, 2, 3), (10, 11)):
        cache.store(blocks)
        cache.unpin(blocks)
    cache.demote((10, 11), {1: None, 2: 1, 3: 2, 10: None, 11: 10})
    assert cache.store((20,)) == ([20], [11])


def test_room_without_identity_evicts_like_blocks_do() -> None:
    """The partial last block of a prompt takes a block's room."""
    cache = BlockCache(2)
    cache.store((1, 2))
    cache.unpin((1, 2))
    assert cache.take_anonymous(1) == [2]
    cache.release_anonymous(1)
    assert cache.free_blocks == 2


def test_tier_store_keeps_the_recently_used_prefix() -> None:
    """A lower tier evicts the least recently used prefix, leaves first."""
    store = TierStore(4, Link(Tier.HOST.name, 1.0))
    assert store.use((1, 2)) == ([1, 2], [])
    assert store.use((10, 11)) == ([10, 11], [])
    assert store.use((1, 2)) == ([], [])
    assert store.use((1, 2, 3)) == ([3], [11])
    assert store.match((1, 2, 3, 4)) == 3
