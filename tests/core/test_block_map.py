"""The growing map of bitmasks against a plain dict."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conductor.core.block_map import BlockMap

ALL = 0b111
changes = st.lists(
    st.tuples(st.sampled_from(["add", "discard", "sweep"]), st.lists(st.integers(0, 200), max_size=20), st.integers(0, 2)),
    max_size=30,
)


@given(changes, st.integers(1, 8))
def test_it_holds_what_a_dict_holds(steps: list[tuple[str, list[int], int]], fill: int) -> None:
    """Whatever the order of changes, the masks and the counts are those of one dict, however many pieces it is in."""
    blocks, model = BlockMap(fill), dict[int, int]()
    for action, hashes, number in steps:
        bit = 1 << number
        if action == "add":
            fresh = {block for block in hashes if not model.get(block, 0) & bit}
            assert blocks.add(hashes, bit, ALL) == len(fresh)
            model.update({block: model.get(block, 0) | bit for block in hashes})
        elif action == "discard":
            held = {block for block in hashes if model.get(block, 0) & bit}
            assert blocks.discard(hashes, bit) == len(held)
            model = {block: mask & ~bit if block in held else mask for block, mask in model.items()}
        else:
            for position in range(len(blocks.shards)):
                blocks.sweep(position, ALL ^ bit)
            model = {block: mask & ~bit for block, mask in model.items()}
        model = {block: mask for block, mask in model.items() if mask}
        assert {block: blocks.get(block) for block in range(201) if blocks.get(block)} == model
        assert blocks.count == len(model)


def test_no_piece_grows_large() -> None:
    """The pieces stay near the wanted size, so that no step of growth takes long; also for a report of many blocks at once."""
    for chunk in (1, 5000):
        blocks = BlockMap(fill=100)
        for start in range(0, 20_000, chunk):
            blocks.add(range(start, start + chunk), 1, ALL)
        assert blocks.count == 20_000
        assert max(map(len, blocks.shards)) <= 300


def test_growth_drops_what_nobody_wants() -> None:
    """Splitting a piece takes bits out that are not to be kept, so a sweep under way need not visit what split off."""
    blocks = BlockMap(fill=4)
    blocks.add(range(4), 0b1, 0b1)
    blocks.add(range(100, 120), 0b10, 0b10)
    assert all(mask == 0b10 for shard in blocks.shards for mask in shard.values())
