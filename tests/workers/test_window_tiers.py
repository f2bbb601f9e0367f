"""A shared tier without window state: it keeps global layers, and what is restored from it is rebuilt by bounded replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conductor.core.types import SHARED_STORE, Role, Tier
from models.base import CausalLM
from models.kv_codec import BlockCodec
from tests.workers.actor_doubles import PROFILE, Cluster, make_job, place, until
from tests.workers.doubles import BLOCK_TOKENS, ROOT, begin, generate, make_engine, make_prompt, prefill, roomy_tiers
from tests.workers.test_window_pulls import windowed
from workers.assembly import Build, WorkerParts, make_cache, make_tiers, node_of
from workers.block_rows import pool_rows
from workers.config import WorkerConfig
from workers.engine import Engine
from workers.global_tier import GlobalLayersTier, global_layers
from workers.kv_store.base import BlockFormat, NewBlock
from workers.kv_store.settings import StoreSettings
from workers.kv_transfer.loopback import Fabric, LoopbackTransport

PROMPT = tuple((7 * i) % 91 + 2 for i in range(101))
BLOCKS = len(PROMPT) // BLOCK_TOKENS
HASHES = make_prompt(PROMPT).hashes


def settings(root: Path, replay_windows: int, codec: str | None = None) -> StoreSettings:
    return roomy_tiers(root, codec=codec, replay_windows=replay_windows, report_interval_s=0.02)


def parts_of(model: CausalLM, fabric: Fabric) -> Build:
    """Workers of one model, with the tiers that their configuration asks for."""

    def build(config: WorkerConfig) -> WorkerParts:
        engine = Engine(model, make_cache(config, model.layout), replay_windows=config.store.replay_windows or None)
        layers = global_layers(model.layout) if config.store.replay_windows else None
        tiers = make_tiers(config, BlockFormat("windowed", engine.cache.kv), None, layers)
        transports = {"loopback": LoopbackTransport(engine.cache.kv, fabric)}
        return WorkerParts(engine, transports, PROFILE, "windowed", lambda domain: ROOT, tiers)

    return build


@pytest.mark.parametrize("codec", [None, "bf16"])
def test_only_the_shared_tier_keeps_global_layers_alone(tmp_path: Path, codec: str | None) -> None:
    """Half of a Gemma-like block, in the tier's number format; what comes back has nothing in window layers."""
    model = windowed(tmp_path)
    engine = make_engine(64, BLOCK_TOKENS, model)
    sequence = begin(engine, make_prompt(PROMPT))
    prefill(engine, sequence)
    config = WorkerConfig(
        worker_id="p0", role=Role.PREFILL, model="m", num_blocks=8, store=settings(tmp_path, 1, codec), profile=PROFILE
    )
    coder = None if codec is None else BlockCodec(codec, model.layout, BLOCK_TOKENS)
    opened = make_tiers(config, BlockFormat("windowed", engine.cache.kv), coder, global_layers(model.layout)).tiers
    windows = [model.layout.has_window(layer) for layer in range(model.layout.num_layers)]
    capacities = {}
    for tier in opened:
        with pool_rows(engine.cache, HASHES[:3], 0) as rows:
            parents = (None, *HASHES)
            assert tier.put([NewBlock(*block) for block in zip(HASHES[:3], parents, rows, strict=False)]) == 3
            with tier.read(HASHES[:3]) as kept:
                before, after = (np.stack(some).view(np.float32).reshape(3, len(windows), -1) for some in (rows, kept))
        seen = [number for number, window in enumerate(windows) if not (tier.bare and window)]
        np.testing.assert_allclose(after[:, seen], before[:, seen], rtol=0.01)
        assert not after[:, [number for number in range(len(windows)) if number not in seen]].any()
        capacities[tier.tier] = tier.capacity_blocks
        assert tier.bare == isinstance(tier, GlobalLayersTier) == (tier.tier is Tier.SHARED)
        tier.close()
    assert capacities[Tier.SHARED] > 1.5 * capacities[Tier.DISK]
    engine.finish(sequence)


async def test_what_is_restored_from_a_shared_tier_is_rebuilt(cluster: Cluster, tmp_path: Path) -> None:
    """On another host the end of the prefix is replayed; on the host that computed it, its memory has everything."""
    model = windowed(tmp_path)
    store, build = settings(tmp_path, 2), parts_of(model, cluster.fabric)
    home = await cluster.add("p0", build=build, store=store, node="a")
    near = await cluster.add("p1", build=build, store=store, node="a")
    away = await cluster.add("p2", build=build, store=settings(tmp_path, 2), node="b")
    await cluster.add("d0", model=model)
    expected = generate(make_engine(64, BLOCK_TOKENS, model), make_prompt(PROMPT, 12), 12)
    for worker in (home, near, away):
        for layer in worker.cache.paged.layers:
            layer.fill_(1e3)
    for name, worker, tier in (("r0", "p0", None), ("r1", "p1", Tier.HOST), ("r2", "p2", Tier.SHARED)):
        job = make_job(name, PROMPT, 12)
        owner = SHARED_STORE if tier is Tier.SHARED else node_of(cluster.workers[worker].config)
        fetched = BLOCKS * BLOCK_TOKENS if tier else 0
        source = owner if tier else None
        await cluster.submit(job, place(job, worker, "d0", fetched=fetched, source=source, tier=tier or Tier.DEVICE))
        assert await cluster.output_of(name) == expected
        assert min(cluster.outputs[name], key=lambda output: output.index).reused_tokens == fetched
        if tier is None:
            await until(lambda: home.store.tiers[Tier.SHARED].match(HASHES) == BLOCKS)
    assert [near.cache.match(HASHES[:depth]) for depth in (1, 10, BLOCKS)] == [1, 10, BLOCKS]
    assert [away.cache.match(HASHES[:depth]) for depth in (1, 10, BLOCKS)] == [0, 0, BLOCKS]


async def test_another_worker_may_read_the_shared_tier_for_one(cluster: Cluster, tmp_path: Path) -> None:
    """It passes on what is there, and who pulled that rebuilds the rest. Too short a prefix to gain by it is not passed on."""
    model = windowed(tmp_path)
    build = parts_of(model, cluster.fabric)
    for worker in ("p0", "p1"):
        store = replace(settings(tmp_path, 2), disk_bytes=0)
        await cluster.add(worker, build=build, store=store, node=worker)
    for worker in ("p2", "d0"):
        await cluster.add(worker, model=model)
    relay, away = cluster.workers["p1"], cluster.workers["p2"]
    job = make_job("r0", PROMPT, 12)
    await cluster.submit(job, place(job, "p0", "d0"))
    expected = await cluster.output_of("r0")
    await until(lambda: relay.store.tiers[Tier.SHARED].match(HASHES) == BLOCKS)
    assert await relay.offer_blocks(HASHES[: relay.engine.replayed_blocks], 0, "p2") is None
    again = make_job("r1", PROMPT, 12)
    await cluster.submit(again, place(again, "p2", "d0", fetched=BLOCKS * BLOCK_TOKENS, source="p1"))
    assert await cluster.output_of("r1") == expected
    assert min(cluster.outputs["r1"], key=lambda output: output.index).reused_tokens == BLOCKS * BLOCK_TOKENS
    assert [away.cache.match(HASHES[:depth]) for depth in (1, 10, BLOCKS)] == [0, 0, BLOCKS]


def test_a_model_with_nothing_but_windows_is_kept_whole(tmp_path: Path) -> None:
    """Nor is there anything to leave out of one without windows."""
    layout = windowed(tmp_path, "mistral").layout
    assert global_layers(layout) is None
    assert global_layers(make_engine().model.layout) is None
