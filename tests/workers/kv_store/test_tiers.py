"""What every tier off the device promises, held against each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from conductor.core.types import BlockHash
from tests.workers.kv_store.conftest import MakeTier
from tests.workers.kv_store.doubles import FORMAT, KV, chain, content, new_blocks
from workers.block_pool import Removed, Stored
from workers.kv_store.base import KVTier


def read(tier: KVTier, names: Sequence[BlockHash]) -> int:
    """How many blocks are read; their bytes are right."""
    with tier.read(names) as rows:
        for name, row in zip(names, rows, strict=False):
            assert np.array_equal(content(name), row)
        return len(rows)


def test_a_stored_prefix_is_read_back(make_tier: MakeTier) -> None:
    """The longest held prefix comes back byte for byte, and what was never stored is a miss."""
    tier = make_tier()
    assert tier.put(new_blocks(chain(0, 5))) == 5
    assert (tier.match(chain(0, 7)), tier.match(chain(1, 5)), tier.match([7])) == (5, 2, 0)
    assert read(tier, chain(0, 7)) == 5
    assert (tier.stats().hits, tier.stats().misses, tier.stats().blocks) == (5, 2, 5)


def test_what_is_expected_need_not_be_there(make_tier: MakeTier) -> None:
    """A hint about blocks that are held, or are not, changes nothing but how soon they come."""
    tier = make_tier()
    tier.put(new_blocks(chain(0, 3)))
    tier.expect(chain(0, 5))
    tier.expect(chain(1, 5))
    assert (read(tier, chain(0, 5)), tier.stats().quarantined) == (3, 0)


def test_a_block_is_kept_once(make_tier: MakeTier) -> None:
    tier = make_tier()
    tier.put(new_blocks(chain(0, 3)))
    assert tier.put(new_blocks(chain(0, 4))) == 1


def test_an_orphan_is_not_kept(make_tier: MakeTier) -> None:
    """A block whose parent is not held would be a hole in a prefix (closure)."""
    tier = make_tier()
    assert tier.put(new_blocks(chain(0, 4))[1:]) == 0
    assert tier.snapshot() == ()


def test_changes_are_told_once(make_tier: MakeTier) -> None:
    """What was stored and removed, with the hash before the first; a snapshot covers what was not told yet."""
    tier = make_tier()
    tier.put(new_blocks(chain(0, 3)))
    assert [Stored(None, chain(0, 3))] == tier.drain_changes()
    tier.put(new_blocks(chain(0, 4)))
    assert [Stored(chain(0, 3)[-1], chain(0, 4)[3:])] == tier.drain_changes()
    tier.remove(chain(0, 4)[2:3])
    assert [Removed(chain(0, 4)[:1:-1])] == tier.drain_changes()
    tier.put(new_blocks(chain(1, 3)))
    assert set(chain(1, 3)) == set(tier.snapshot())
    assert tier.drain_changes() == []


def test_a_full_tier_makes_room_from_the_leaves(make_tier: MakeTier) -> None:
    """It never holds more than its capacity, and what it holds it holds from the root on."""
    tier = make_tier(blocks=20)
    for branch in range(12):
        tier.put(new_blocks(chain(branch, 6)))
        held = set(tier.snapshot())
        assert len(held) <= 20
        for other in range(branch + 1):
            depth = tier.match(chain(other, 6))
            assert held.isdisjoint(chain(other, 6)[depth:])
            assert read(tier, chain(other, 6)) == depth
    assert tier.stats().evicted > 0
    assert tier.match(chain(11, 6)) == 6


def test_pinned_prefixes_survive_a_flood(make_tier: MakeTier) -> None:
    tier = make_tier(blocks=20)
    tier.put(new_blocks(chain(0, 6)))
    assert tier.pin(chain(0, 9)) == 6
    for branch in range(1, 12):
        tier.put(new_blocks(chain(branch, 6)))
    assert read(tier, chain(0, 6)) == 6
    tier.remove(chain(0, 1))
    assert set(chain(0, 6)) == set(tier.snapshot())
    tier.unpin(chain(0, 9))
    assert tier.remove(chain(0, 6)[2:]) == 4


def test_another_format_shares_nothing(make_tier: MakeTier) -> None:
    """A new model or layout version under a warm cache finds an empty one, and the old one keeps its blocks."""
    old = make_tier()
    old.put(new_blocks(chain(0, 3)))
    for other in (replace(FORMAT, namespace="model-b"), replace(FORMAT, kv=replace(KV, version=2))):
        tier = make_tier(block_format=other)
        assert (tier.match(chain(0, 3)), tier.snapshot()) == (0, ())
    assert read(old, chain(0, 3)) == 3


def test_what_one_process_stores_the_next_one_reads(make_tier: MakeTier) -> None:
    """Two users of one store at the same time, each seeing the other's blocks."""
    first, second = make_tier(), make_tier()
    first.put(new_blocks(chain(0, 4)))
    assert read(second, chain(0, 4)) == 4
    second.put(new_blocks(chain(0, 6)))
    assert read(first, chain(0, 6)) == 6
