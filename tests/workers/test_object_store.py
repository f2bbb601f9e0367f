"""What the object-store transport does with the pieces that come out of the store, without a store."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.kv_transfer.object_store import joined


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=3))
def test_what_lies_side_by_side_is_read_in_one_piece(memories: list[list[int]]) -> None:
    pieces, whole = [], []
    for number, lengths in enumerate(memories):
        memory = np.full((sum(lengths) + 2, 64), number, np.uint8)  # a row at either end keeps memories apart
        memory[:, 0] = np.arange(len(memory))
        bounds = np.cumsum([1, *lengths])
        pieces += [memory[start:stop] for start, stop in pairwise(bounds)]
        whole.append(memory[1:-1])
    views = joined(pieces)
    assert [view.tolist() for view in views] == [memory.tolist() for memory in whole]
    assert not any(view.flags.writeable for view, lengths in zip(views, memories, strict=True) if len(lengths) > 1)
