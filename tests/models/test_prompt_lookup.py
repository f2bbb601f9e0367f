"""Guesses by prompt lookup: what followed the same ending before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.prompt_lookup import LONGEST_MATCH, SHORTEST_MATCH, guess_next


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], 2, [3, 9]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),  # the latest
        ([5, 1, 2, 3, 7, 1, 2, 4, 5, 1, 2], 1, [3]),  # the longest, though a shorter one is later
        ([1, 2, 1, 2], 4, [1, 2]),  # as far as there is something
        ([7, 7, 7], 3, [7]),
        ([1, 2, 3, 4], 3, []),
        ([2, 3, 2], 3, []),  # one token alone is no match
        ([1, 2, 3, 1, 2], 0, []),
        ([], 3, []),
    ],
)
def test_what_followed_before_is_guessed(tokens: list[int], count: int, expected: list[int]) -> None:
    assert guess_next(tokens, count) == expected


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5))
def test_a_guess_followed_the_longest_match_that_there_is(tokens: list[int], count: int) -> None:
    """Against the search written down plainly."""
    expected: list[int] = []
    for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        places = [i for i in range(len(tokens) - length) if tokens[i : i + length] == tokens[len(tokens) - length :]]
        if places and length < len(tokens):
            expected = tokens[places[-1] + length :][:count]
            break
    assert guess_next(tokens, count) == expected
