"""Tiers that keep KV in another number format: fewer bytes at rest, what the format keeps, and no mixing with others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from conductor.core.types import Role, Tier
from models.kv_codec import BlockCodec
from models.kv_layout import FORMATS
from models.load import load_model
from tests.models.builders import write_tiny_folder
from tests.workers.actor_doubles import PROFILE
from tests.workers.doubles import begin, make_engine, make_prompt, prefill, roomy_tiers
from tests.workers.kv_store.doubles import chain
from tests.workers.test_coded_transport import BLOCK_TOKENS, LAYOUT, blocks
from workers.assembly import build_parts, make_tiers
from workers.block_rows import pool_rows, restore
from workers.coded_tier import AT_REST, CodedTier
from workers.config import WorkerConfig
from workers.device_cache import describe_layout
from workers.kv_store.base import BlockFormat, KVTier, NewBlock
from workers.kv_store.hierarchy import Hierarchy
from workers.kv_store.inspection import stored_blocks
from workers.kv_store.settings import StoreSettings

FORMAT = BlockFormat("tiny", describe_layout(LAYOUT, BLOCK_TOKENS))
NAMES = chain(0, 3)


def settings(root: Path, codec: str | None) -> StoreSettings:
    return roomy_tiers(root, codec=codec)


def config(store: StoreSettings, model: str = "tiny") -> WorkerConfig:
    return WorkerConfig(
        worker_id="p0",
        role=Role.PREFILL,
        model=model,
        num_blocks=8,
        block_tokens=BLOCK_TOKENS,
        transport="loopback",
        profile=PROFILE,
        store=store,
    )


@contextmanager
def opened(root: Path, codec: str | None) -> Iterator[dict[Tier, KVTier]]:
    store = settings(root, codec)
    tiers = make_tiers(config(store), FORMAT, None if codec is None else BlockCodec(codec, LAYOUT, BLOCK_TOKENS)).tiers
    yield {tier.tier: tier for tier in tiers}
    for tier in tiers:
        tier.close()


def prefix() -> list[NewBlock]:
    rows = np.stack(blocks(len(NAMES)), axis=1).reshape(len(NAMES), -1)
    return [NewBlock(name, NAMES[at - 1] if at else None, row) for at, (name, row) in enumerate(zip(NAMES, rows, strict=True))]


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_is_what_the_format_keeps(name: str, tmp_path: Path) -> None:
    """Exactly what the codec gives back, from files of exactly its size that anybody can verify; host memory stays as it is."""
    codec = BlockCodec(name, LAYOUT, BLOCK_TOKENS)
    with opened(tmp_path, name) as tiers:
        for tier in tiers.values():
            assert tier.put(prefix()) == len(NAMES)
            assert tier.match(NAMES) == len(tier.held()) == tier.stats().blocks == len(NAMES)
            with tier.read(NAMES) as rows:
                for row, block in zip(rows, prefix(), strict=True):
                    plain = torch.from_numpy(block.data).view(LAYOUT.num_layers, -1)
                    kept = codec.decode(codec.encode(plain)) if tier.tier in AT_REST else plain
                    assert np.array_equal(row, kept.flatten().numpy())
        assert not isinstance(tiers[Tier.HOST], CodedTier)
    for directory in ("disk", "shared"):
        listed = list(stored_blocks(tmp_path / directory, payloads=True))
        assert len(listed) == len(NAMES)
        assert {block.damage for block in listed} == {None}


def test_fewer_bytes_hold_more_blocks(tmp_path: Path) -> None:
    """The same capacity in bytes."""
    with opened(tmp_path / "a", None) as plain, opened(tmp_path / "b", "fp8") as coded:
        for tier in AT_REST:
            assert coded[tier].capacity_blocks > 2.5 * plain[tier].capacity_blocks
        assert coded[Tier.HOST].capacity_blocks == plain[Tier.HOST].capacity_blocks


def test_unlike_formats_share_a_directory_and_nothing_else(tmp_path: Path) -> None:
    """Nobody reads another's bytes as its own, and what each has stored stays."""
    for codec in (None, "fp8", "int8"):
        with opened(tmp_path, codec) as tiers:
            assert [tiers[tier].match(NAMES) for tier in AT_REST] == [0, 0]
            assert [tiers[tier].put(prefix()) for tier in AT_REST] == [3, 3]
    with opened(tmp_path, "fp8") as tiers:
        assert [tiers[tier].match(NAMES) for tier in AT_REST] == [3, 3]


def test_a_worker_restores_what_another_kept_in_fewer_bytes(tmp_path: Path) -> None:
    """Through the write-behind and back into a device pool, within the format's error; pins, drops and news reach the tier."""
    write_tiny_folder(tmp_path / "model", "llama", head_dim=16, num_hidden_layers=2)
    model = load_model(str(tmp_path / "model")).model
    home, away = (make_engine(8, BLOCK_TOKENS, model) for _ in range(2))
    tokens = tuple((7 * i) % 91 + 2 for i in range(45))
    sequence = begin(home, make_prompt(tokens, 8, BLOCK_TOKENS))
    prefill(home, sequence)
    names = sequence.hashes[: sequence.named]
    assert len(names) == 2
    block_format, codec = BlockFormat("tiny", home.cache.kv), BlockCodec("fp8", model.layout, BLOCK_TOKENS)
    store = replace(settings(tmp_path, "fp8"), host_bytes=0)
    kept = make_tiers(config(store), block_format, codec)
    hierarchy = Hierarchy(kept, partial(pool_rows, home.cache), 64)
    hierarchy.keep(names, "chat", len(names))
    assert hierarchy.flush(20)
    for tier in kept.tiers:
        away.cache.evict_idle()
        assert restore(away.cache, tier, names).blocks == len(names)
        with pool_rows(home.cache, names, 0) as exact, pool_rows(away.cache, names, 0) as restored:
            before, after = (torch.from_numpy(np.stack(rows)).view(model.layout.dtype).float() for rows in (exact, restored))
        assert 0 < float((after - before).norm() / before.norm()) < 0.2
        assert (tier.pin(names), tier.remove(names)) == (len(names), 0)
        tier.unpin(names)
        assert set(tier.snapshot()) == set(names)
        assert tier.look() == []
        assert tier.remove(names[1:]) == 1
    home.finish(sequence)
    hierarchy.close()


def test_a_workers_tiers_speak_the_configured_format(tmp_path: Path) -> None:
    """Only those at rest; a wrong name is refused with what is allowed."""
    write_tiny_folder(tmp_path / "model", "llama")
    parts = build_parts(config(settings(tmp_path, "int8"), str(tmp_path / "model")))
    assert {tier.tier for tier in parts.tiers.tiers if isinstance(tier, CodedTier)} == set(AT_REST)
    for tier in parts.tiers.tiers:
        tier.close()
    with pytest.raises(ValueError, match=r"store.codec is 'fp7'; allowed: fp32, bf16"):
        settings(tmp_path, "fp7")
