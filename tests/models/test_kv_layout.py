"""Bytes of cached state, counted exactly, against the figures that the models' authors publish."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.base import KVLayout, PagedKVCache
from models.errors import ModelFileError
from models.kv_layout import (
    FORMATS,
    StateKind,
    grouped_query,
    latent,
    number_format,
    sliding_window,
    state_bytes,
)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        pytest.param(grouped_query(30, 3, 64, number_format("fp32")), 46_080, id="SmolLM2-135M fp32"),
        pytest.param(latent(61, 512, 64, number_format("bf16")), 70_272, id="DeepSeek-V3 bf16"),
        pytest.param(grouped_query(80, 8, 128, number_format("fp16")), 327_680, id="LLaMA3-70B fp16"),
        pytest.param(grouped_query(126, 8, 128, number_format("bf16")), 516_096, id="LLaMA-3.1-405B bf16"),
        pytest.param(grouped_query(95, 8, 128, number_format("bf16")), 389_120, id="DeepSeek-67B bf16"),
    ],
)
def test_bytes_per_token_are_the_published_ones(state: StateKind, expected: int) -> None:
    assert state.bytes_per_token == expected


def v41_flash() -> list[StateKind]:
    """The global state of DeepSeek-V4.1-Flash: three encoder groups keep one entry for two tokens, the
    decoder's source layer one a token; each entry is a latent of 512 in fp4 and an indexer key of 128."""
    return [
        StateKind("encoder", 3, 512, number_format("fp4"), tokens_per_entry=2),
        StateKind("encoder indexer", 3, 128, number_format("mxfp4"), tokens_per_entry=2),
        StateKind("decoder", 1, 512, number_format("fp4")),
        StateKind("decoder indexer", 1, 128, number_format("mxfp4")),
    ]


def test_compressed_and_shared_state_adds_up_to_the_published_890_bytes() -> None:
    """Packed fp4 with its scales is 288 bytes an entry, the indexer's key 68, stored (3/2 + 1) times a token."""
    assert [kind.entry_bytes for kind in v41_flash()] == [288, 68, 288, 68]
    assert state_bytes(v41_flash()).global_per_token == 890


def test_window_state_is_counted_apart_and_does_not_grow() -> None:
    """What stays on its host is no part of the bytes that a token adds to shared tiers."""
    window = sliding_window(20, 1, 512, number_format("bf16"), window_tokens=128)
    total = state_bytes([*v41_flash(), window])
    assert (total.global_per_token, total.window_bytes) == (890, 20 * 128 * 2 * 512 * 2)
    assert window.bytes_at(100) * 128 == window.bytes_at(1_000_000) * 100


def test_an_entry_of_several_tokens_counts_once_it_is_complete() -> None:
    kind = StateKind("pooled", 1, 8, number_format("bf16"), tokens_per_entry=4)
    assert [kind.bytes_at(tokens) for tokens in (3, 4, 7, 8)] == [0, 16, 16, 32]
    assert kind.bytes_per_token == Fraction(4)


@pytest.mark.parametrize(
    ("name", "elements", "expected"),
    [("fp8", 64, 65), ("fp8", 65, 67), ("int8", 64, 66), ("fp4", 16, 9), ("fp4", 17, 11), ("mxfp4", 32, 17), ("fp32", 3, 12)],
)
def test_scales_of_started_groups_and_half_bytes_are_counted(name: str, elements: int, expected: int) -> None:
    assert number_format(name).bytes_for(elements) == expected


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(ModelFileError, match="KV format is 'fp7'; allowed: fp32, bf16"):
        number_format("fp7")


@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 4096), st.integers(1, 4096))
def test_more_elements_never_take_fewer_bytes(name: str, first: int, second: int) -> None:
    low, high = sorted((first, second))
    assert FORMATS[name].bytes_for(low) <= FORMATS[name].bytes_for(high)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_paged_cache_allocates_what_its_layout_counts(dtype: torch.dtype) -> None:
    layout = KVLayout("gqa", 1, 3, (2, 2, 16), dtype)
    cache = PagedKVCache(layout, num_blocks=5, block_tokens=8)
    assert sum(layer.nbytes for layer in cache.layers) == layout.bytes_per_token * 5 * 8
    assert layout.state.elements == 64
