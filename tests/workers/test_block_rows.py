"""Blocks between a device pool and a tier: the same bytes down and up, whole or in part, and nothing left pinned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.workers.doubles import begin, expected_output, generate, make_engine, make_prompt, prefill
from workers.block_rows import pool_rows, restore
from workers.engine import Engine
from workers.kv_store.base import BlockFormat, KVTier, NewBlock
from workers.kv_store.shared_directory import SharedDirectoryTier

PROMPT = make_prompt([(7 * i) % 91 for i in range(26)])


def staged(engine: Engine) -> Engine:
    """As if the pool's memory were an accelerator's, out of reach but for gathering and scattering."""
    engine.cache._rows = None
    return engine


def computed(engine: Engine) -> Engine:
    sequence = begin(engine, PROMPT)
    prefill(engine, sequence)
    engine.finish(sequence)
    return engine


def store(engine: Engine, path: Path, blocks: int) -> KVTier:
    tier = SharedDirectoryTier([str(path)], BlockFormat("chain", engine.cache.kv), 1 << 20)
    names: Sequence[int] = PROMPT.hashes[:blocks]
    with pool_rows(engine.cache, names, 0) as rows:
        parents = (None, *names)
        assert tier.put([NewBlock(*block) for block in zip(names, parents, rows, strict=False)]) == blocks
    assert engine.cache.pinned == 0
    return tier


@pytest.mark.parametrize("source", [make_engine, lambda: staged(make_engine())], ids=["memory", "accelerator"])
@pytest.mark.parametrize("target", [make_engine, lambda: staged(make_engine())], ids=["memory", "accelerator"])
def test_what_is_restored_is_what_was_computed(source: type[Engine], target: type[Engine], tmp_path: Path) -> None:
    """Every KV entry counts in the model's answer."""
    tier = store(computed(source()), tmp_path, 6)
    engine = target()
    restored = restore(engine.cache, tier, PROMPT.hashes)
    assert (restored.blocks, restored.nbytes) == (6, 6 * engine.cache.kv.block_bytes)
    assert engine.cache.match(PROMPT.hashes) == 6
    assert engine.cache.pinned == 0
    assert generate(engine, PROMPT, 8) == expected_output(PROMPT.tokens, 8)


def test_what_the_tier_lacks_is_left_to_be_computed(tmp_path: Path) -> None:
    tier = store(computed(make_engine()), tmp_path, 4)
    engine = make_engine()
    tier.drain_changes()
    assert restore(engine.cache, tier, PROMPT.hashes).blocks == 4
    assert [set(change.blocks) for change in tier.drain_changes()][-1] == set(PROMPT.hashes[4:])
    assert engine.cache.available == engine.cache.num_blocks
    assert generate(engine, PROMPT, 8) == expected_output(PROMPT.tokens, 8)


def test_only_what_the_pool_lacks_is_read(tmp_path: Path) -> None:
    engine = computed(make_engine())
    tier = store(engine, tmp_path, 6)
    assert restore(engine.cache, tier, PROMPT.hashes).blocks == 0
    assert tier.stats().hits == 0


def test_a_pool_without_room_restores_nothing(tmp_path: Path) -> None:
    tier = store(computed(make_engine()), tmp_path, 6)
    small = make_engine(num_blocks=4)
    assert restore(small.cache, tier, PROMPT.hashes).blocks == 0
    assert small.cache.pinned == 0


def test_rows_begin_where_they_are_asked_to(tmp_path: Path) -> None:
    engine = computed(make_engine())
    with pool_rows(engine.cache, PROMPT.hashes, 0) as whole, pool_rows(engine.cache, PROMPT.hashes, 4) as rest:
        assert [np.array_equal(*pair) for pair in zip(whole[4:], rest, strict=True)] == [True, True]
    with pool_rows(engine.cache, [1, 2], 0) as nothing:
        assert nothing == []
