"""Block hashes name prefixes, and nothing else than equal prefixes in one namespace share them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.core.hashing import KVNamespace, extend, hash_blocks

BASE = KVNamespace(("smollm2", "r1", "tok", "float32", "gqa-1"), 4)
token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def tokens(values: list[int]) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


@given(token_lists, token_lists)
def test_hashes_agree_exactly_as_far_as_full_blocks_do(first: list[int], second: list[int]) -> None:
    """Two prompts share as many leading hashes as they share full leading blocks."""
    left, right = hash_blocks(BASE.seed, tokens(first), 4), hash_blocks(BASE.seed, tokens(second), 4)
    assert len(left) == len(first) // 4
    for depth, (one, other) in enumerate(zip(left, right, strict=False)):
        assert (one == other) == (first[: 4 * depth + 4] == second[: 4 * depth + 4])


@given(token_lists)
def test_a_chain_can_be_continued(values: list[int]) -> None:
    """Hashing on from a block's hash gives the same as hashing the whole."""
    whole = hash_blocks(BASE.seed, tokens(values), 4)
    parent = BASE.seed
    for depth, block in enumerate(whole):
        parent = extend(parent, tokens(values[4 * depth : 4 * depth + 4]))
        assert parent == block


@pytest.mark.parametrize(
    "other",
    [
        KVNamespace(BASE.model[:-1], 4),
        KVNamespace((*BASE.model[:3], "bfloat16", "gqa-1"), 4),
        KVNamespace((*BASE.model[:4], "gqa-2"), 4),
        KVNamespace(BASE.model, 8),
        KVNamespace(BASE.model, 4, adapter=""),
        KVNamespace(BASE.model, 4, adapter="None"),
        KVNamespace(BASE.model, 4, adapter="a"),
        KVNamespace(BASE.model, 4, salt="a"),
        KVNamespace(BASE.model, 4, salt="\ud800"),
        KVNamespace(("smollm2r1", "", "tok", "float32", "gqa-1"), 4),
    ],
    ids=repr,
)
def test_namespaces_never_share_a_block(other: KVNamespace) -> None:
    """Model, dtype, layout, block size, adapter and salt all separate, and no two fields run together."""
    assert other.seed != BASE.seed
    assert set(hash_blocks(other.seed, tokens([1] * 8), 4)).isdisjoint(hash_blocks(BASE.seed, tokens([1] * 8), 4))


def test_every_process_agrees() -> None:
    """Hashes do not depend on the process's hash seed."""
    code = f"from conductor.core.hashing import *; print(hash_blocks(KVNamespace({BASE.model!r}, 4).seed, bytes(range(64)), 4))"
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.strip() == str(hash_blocks(BASE.seed, bytes(range(64)), 4))


def test_a_block_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="block_tokens is 0"):
        KVNamespace((), 0)


def test_a_prompt_is_cut_into_blocks_of_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="block_tokens is 0"):
        hash_blocks(BASE.seed, tokens([1, 2]), 0)


def test_tokens_of_another_width_are_refused() -> None:
    """An array of int64 would give every prompt hashes that no engine ever reports."""
    with pytest.raises(ValueError, match="items of 8 bytes"):
        hash_blocks(BASE.seed, memoryview(np.arange(8)), 4)


def test_arrays_hash_as_their_bytes() -> None:
    values = np.arange(16, dtype="<i4")
    assert hash_blocks(BASE.seed, memoryview(values), 4) == hash_blocks(BASE.seed, values.tobytes(), 4)


def test_adapter_and_salt_do_not_run_together() -> None:
    """A tenant's salt cannot pass for an adapter, nor one list of model fields for another."""
    names = [None, "", "a", "ab", "b"]
    seeds = {
        KVNamespace(model, 4, adapter, salt or "").seed
        for model in ((), ("a",), ("a", "b"), ("ab",))
        for adapter in names
        for salt in names[1:]
    }
    assert len(seeds) == 4 * 5 * 4
