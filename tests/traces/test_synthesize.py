"""Prompts from hash ids: equal ids give equal tokens, at every scale."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traces.builders import request_of
from traces.schema import TraceRequest
from traces.synthesize import TokenRange, prompt_tokens, scaled

RANGE = TokenRange(100, 5_000)
id_lists = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5)
scales = st.sampled_from([1.0, 0.3, 0.05, 0.013, 0.0001])


@given(id_lists, id_lists, id_lists, st.integers(1, 512), scales)
def test_common_leading_ids_give_a_common_prefix(
    common: list[int], first: list[int], second: list[int], tail: int, scale: float
) -> None:
    """Two prompts that share `common` share its blocks token for token, wherever they stand in the trace."""
    one, two = (scaled(request_of(common + rest, tail_tokens=tail), scale) for rest in (first, second))
    shared_tokens = len(common) * one.block_tokens
    assert prompt_tokens(one, 3, RANGE)[:shared_tokens] == prompt_tokens(two, 8, RANGE)[:shared_tokens]


@given(id_lists, st.integers(1, 512), scales)
def test_a_prompt_has_the_length_and_the_blocks_that_the_request_says(ids: list[int], tail: int, scale: float) -> None:
    request = scaled(request_of(ids, tail_tokens=tail), scale)
    prompt = prompt_tokens(request, 0, RANGE)
    assert request.input_tokens == len(prompt)
    assert len(request.hash_ids) == -(-request.input_tokens // request.block_tokens)
    assert all(100 <= token < 5_000 for token in prompt)


@given(st.integers(0, 2**64 - 2))
def test_different_ids_give_different_tokens(block_id: int) -> None:
    one, two = (prompt_tokens(request_of([each]), 0, RANGE) for each in (block_id, block_id + 1))
    assert one[:16] != two[:16]


def test_requests_without_identity_differ_by_their_place() -> None:
    request = TraceRequest(0.0, 40, 1)
    assert prompt_tokens(request, 1, RANGE) != prompt_tokens(request, 2, RANGE)
    assert prompt_tokens(request, 1, RANGE) == prompt_tokens(request, 1, RANGE)


def test_the_tokens_of_a_block_are_the_same_in_every_version() -> None:
    """Recorded results stay comparable: the drawing of tokens is part of the format."""
    assert prompt_tokens(request_of([42], tail_tokens=5), 0, RANGE) == RECORDED


RECORDED = [2_206, 4_610, 4_575, 1_829, 4_767]


def test_a_hundred_tokens_at_a_twentieth() -> None:
    """A block of 512 becomes one of 26; a tail shrinks by itself; at least one output token stays."""
    request = scaled(TraceRequest(0.0, 2 * 512 + 100, 4, (1, 2, 3)), 0.05)
    assert (request.block_tokens, request.input_tokens, request.output_tokens) == (26, 57, 1)


@pytest.mark.parametrize(("low", "high"), [(-1, 5), (5, 5), (6, 5)])
def test_an_empty_token_range_is_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=f"token range is {low}:{high}; allowed"):
        TokenRange(low, high)
