"""A worker's parts, built from a small model on disk."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conductor.config import Config
from conductor.core.hashing import KVNamespace, hash_blocks
from conductor.core.types import Role
from conductor.serve import prepare_model
from models.folder import namespace_in_formats
from models.kv_layout import FORMATS
from tests.models.builders import write_tiny_folder
from tests.models.test_windows import write_windowed
from tests.workers.actor_doubles import PROFILE
from tests.workers.doubles import packed
from workers.assembly import PROBE, build_parts, round_trip, throttled_profile, warm_up
from workers.config import WorkerConfig
from workers.exchange import Held, publish_prefix
from workers.kv_store.settings import StoreSettings
from workers.kv_transfer.base import KVDescriptor, KVTicket
from workers.kv_transfer.blocks import KVBlocks
from workers.kv_transfer.loopback import Fabric, LoopbackTransport
from workers.kv_transfer.paired import PairedTransports
from workers.kv_transfer.throttled import LinkLimit


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerConfig:
    monkeypatch.setenv("CONDUCTOR_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)
    write_tiny_folder(tmp_path / "tiny", "llama")
    return WorkerConfig(
        worker_id="p0",
        role=Role.PREFILL,
        model=str(tmp_path / "tiny"),
        kv_memory_bytes=3 * 2 * 2 * 16 * 4 * 16 * 12,
        block_tokens=16,
        transport="loopback",
        profile_budget_s=0.3,
    )


def test_parts_fit_together(config: WorkerConfig) -> None:
    """Capacity follows from the memory budget, the profile is measured, and the warm-up leaves an empty cache."""
    parts = build_parts(config)
    assert parts.engine.cache.num_blocks == 12
    assert parts.model_name == "tiny"
    assert parts.profile.calibrated
    assert parts.profile.kv_bytes_per_token == parts.engine.cache.kv.block_bytes // 16
    assert (parts.profile.kv_window_bytes_per_token, parts.profile.kv_window_tokens) == (0, 0)
    warm_up(parts.engine)
    assert (parts.engine.cache.pinned, parts.engine.cache.idle, parts.engine.cache.drain_changes()) == (0, 0, [])


@pytest.mark.parametrize("codec", [None, "bf16"])
def test_the_profile_says_what_a_pull_moves(config: WorkerConfig, tmp_path: Path, codec: str | None) -> None:
    """Block by block, what is offered of a prefix of a model with windows, in the format in which it moves."""
    write_windowed(tmp_path / "windowed", "gemma2")
    config = replace(config, model=str(tmp_path / "windowed"), kv_memory_bytes=1 << 20, block_tokens=4, transport_codec=codec)
    parts = build_parts(replace(config, profile=replace(PROFILE, kv_bytes_per_token=4 * 2 * 2 * 16 * 4)))
    engine = parts.engine
    paired = PairedTransports(engine.cache.kv, parts.transports)
    exchange = parts.exchange(engine.cache, paired, 20.0)
    for blocks in (1, 5, 6, 14):
        held = Held(list(range(blocks)), max(0, blocks - engine.cache.window_blocks))
        offered = publish_prefix(exchange, engine.cache, held, 0, "p1", ())
        assert sum(part.ticket.nbytes for part in offered) == parts.profile.moved_bytes(4 * blocks)
        for part in offered:
            exchange.release(part.ticket.id)
    assert parts.profile.moved_bytes(1000) < 1000 * parts.profile.kv_bytes_per_token
    exchange.close()


def test_the_transfer_probe_moves_what_it_is_asked_to() -> None:
    """Profiles measure the transport with exactly the sizes that they fit."""
    fabric: Fabric = {}
    transport = Counting(PROBE, fabric)
    for nbytes in (1 << 18, 1 << 22):
        round_trip(transport, nbytes)
    assert transport.moved == [1 << 18, 1 << 22]
    assert (transport.offered, fabric) == (0, {})


class Counting(LoopbackTransport):
    def __init__(self, kv: KVDescriptor, fabric: Fabric) -> None:
        super().__init__(kv, fabric)
        self.moved: list[int] = []

    def fetch(self, ticket: KVTicket, into: KVBlocks, timeout_s: float, first: int = 0) -> None:
        self.moved.append(into.nbytes)
        super().fetch(ticket, into, timeout_s, first)


def test_tenants_have_roots_of_their_own(config: WorkerConfig) -> None:
    """A tenant's first block chains to the namespace that its gateway hashes in."""
    parts = build_parts(replace(config, profile=PROFILE))
    assert parts.root_of("a") != parts.root_of("b")
    assert isinstance(hash_blocks(parts.root_of("a"), packed(range(16)), 16)[0], int)
    assert KVNamespace(("x",), 16, salt="a").seed != parts.root_of("a")


def test_a_throttle_shows_in_the_profile() -> None:
    """The scheduler must foresee the slow link that a transfer will meet."""
    slow = throttled_profile(replace(PROFILE, transfer_bytes_per_s=1e9, transfer_latency_s=0.001), LinkLimit(4, latency_ms=2))
    assert (slow.transfer_bytes_per_s, slow.transfer_latency_s) == (5e8, 0.003)
    assert throttled_profile(PROFILE, LinkLimit()) == PROFILE


def test_tiers_are_opened_for_everything_that_kv_depends_on(config: WorkerConfig, tmp_path: Path) -> None:
    """Weights in another format, or other arithmetic, give other KV: such workers share no stored block."""
    store = StoreSettings(disk_directory=tmp_path / "disk", disk_bytes=1 << 20)
    formats = set()
    for changes in ({}, {"weights": "int8"}, {"weights": "int4"}, {"compute_dtype": "bfloat16"}, {"transport_codec": "fp8"}):
        parts = build_parts(replace(config, store=store, profile=PROFILE, **changes))
        (tier,) = parts.tiers.tiers
        formats.add(tier.format.fingerprint)
        assert parts.profile.tier_bytes_per_s[tier.tier] > 0
        tier.close()
    assert len(formats) == 5


def test_what_moves_with_losses_never_has_an_exact_blocks_name(config: WorkerConfig) -> None:
    """Gateway and worker of a deployment name a prompt alike; no two deployments that move KV in unlike formats do, unless
    what arrives is the same to the bit."""
    tokens, firsts = packed(range(32)), {}
    for kv_dtype, codec in itertools.product(("float32", "bfloat16"), (None, *FORMATS)):
        served = Config.model_validate(
            {
                "model": {"name": config.model, "kv_dtype": kv_dtype},
                "workers": {"transport_codec": codec},
                "scheduler": {"block_tokens": 16},
            }
        )
        worker = replace(config, kv_dtype=kv_dtype, transport_codec=codec, profile=PROFILE)
        names = hash_blocks(build_parts(worker).root_of("tenant"), tokens, 16)
        assert prepare_model(served).hash_prompt(tokens, "tenant") == names
        firsts[kv_dtype, codec] = names[0]
    plain, half = firsts["float32", None], firsts["bfloat16", None]
    exact = {plain: {("float32", None), ("float32", "fp32")}}
    exact |= {half: {("bfloat16", None), ("bfloat16", "fp32"), ("bfloat16", "bf16")}}
    for name, ways in exact.items():
        assert {way for way, first in firsts.items() if first == name} == ways
    assert len(set(firsts.values())) == len(firsts) - 3


def test_what_follows_from_a_short_replay_never_has_an_exact_blocks_name(config: WorkerConfig) -> None:
    """Gateway and worker agree on a name of its own."""
    tokens, names = packed(range(32)), []
    for windows in (0, 1):
        sections = {"model": {"name": config.model}, "scheduler": {"block_tokens": 16}, "store": {"replay_windows": windows}}
        worker = replace(config, store=StoreSettings(replay_windows=windows), profile=PROFILE)
        names.append(hash_blocks(build_parts(worker).root_of("tenant"), tokens, 16))
        assert prepare_model(Config.model_validate(sections)).hash_prompt(tokens, "tenant") == names[-1]
    assert names[0] != names[1]


def test_what_is_stored_with_losses_never_has_an_exact_blocks_name() -> None:
    """Nor that of what moves in the same format."""
    ways = [(None, None), ("int8", None), (None, "int8"), ("int8", "int8"), ("fp32", "fp32")]
    names = [namespace_in_formats(("model",), "float32", moved=moved, stored=stored) for moved, stored in ways]
    assert names[0] == names[4] == ("model",)
    assert len(set(names)) == 4
