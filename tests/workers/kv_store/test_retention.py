"""Which blocks go first, and when any go at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.kv_store.retention import DAY_S, HeldBlock, RetentionPolicy, plan_eviction, with_descendants

POLICY = RetentionPolicy()


def held(
    name: int, parent: int | None, last_used_s: float = 0.0, traffic_class: str = "chat", pinned: bool = False
) -> HeldBlock:
    return HeldBlock(name, parent, last_used_s, traffic_class, pinned)


def test_leaves_go_before_their_roots() -> None:
    """A prefix loses its end first, although its root was used longer ago."""
    blocks = [held(1, None, 0.0), held(2, 1, 1.0), held(3, 2, 2.0)]
    assert plan_eviction(blocks, 2, POLICY) == [3, 2]


def test_the_least_recently_used_goes_first() -> None:
    assert plan_eviction([held(1, None, 5.0), held(2, None, 3.0), held(3, None, 9.0)], 3, POLICY) == [2, 1, 3]


def test_a_class_with_a_shorter_target_goes_earlier() -> None:
    """Agent KV is wanted for three days and chat KV for seven: the older chat block stays."""
    blocks = [held(1, None, 0.0, "chat"), held(2, None, 3 * DAY_S, "agent")]
    assert plan_eviction(blocks, 1, POLICY) == [2]


def test_a_target_is_no_timer() -> None:
    """However old blocks are, they stay while there is room."""
    assert POLICY.to_evict(used=90, incoming=5, capacity=100) == 0


def test_reclaim_goes_on_to_the_low_watermark() -> None:
    assert POLICY.to_evict(used=95, incoming=1, capacity=100) == 11


def test_pinned_blocks_and_their_ancestors_stay() -> None:
    blocks = [held(1, None), held(2, 1, pinned=True), held(3, 2), held(4, None)]
    assert {3, 4} == set(plan_eviction(blocks, 9, POLICY))


def test_what_follows_a_block_goes_with_it() -> None:
    """Leaves first, and nothing beside."""
    blocks = [(1, None), (2, 1), (3, 2), (4, 1), (5, None)]
    assert with_descendants(blocks, [2, 99]) == [3, 2]
    order = with_descendants(blocks, [1, 2])
    assert {1, 2, 3, 4} == set(order)
    assert (order.index(3) < order.index(2) < order.index(1), order[-1]) == (True, 1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"low_watermark": 0.9, "high_watermark": 0.8}, "low_watermark is 0.9"),
        ({"high_watermark": 1.1}, "high_watermark is 1.1"),
        ({"targets_s": {"agent": -1.0}}, "'agent' is -1.0"),
    ],
)
def test_wrong_settings_are_named(bad: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RetentionPolicy(**bad)  # type: ignore[arg-type]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1e6), st.booleans()), max_size=25), st.integers(0, 30))
def test_a_tier_stays_closed_at_every_step(shape: list[tuple[int, float, bool]], count: int) -> None:
    """Whatever the forest looks like, no block outlives its parent, and nothing pinned goes."""
    blocks = [
        held(at, None if parent >= at else parent, used, pinned=pinned) for at, (parent, used, pinned) in enumerate(shape)
    ]
    going = plan_eviction(blocks, count, POLICY)
    left = {block.name: block for block in blocks}
    for name in going:
        assert not left.pop(name).pinned
        assert all(block.parent is None or block.parent in left for block in left.values())
    leaves = set(left) - {block.parent for block in left.values()}
    assert len(going) == count or all(left[name].pinned for name in leaves)
