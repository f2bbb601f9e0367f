"""Pulls of models with sliding windows: no byte more than later tokens see, the same text, no reuse of what is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conductor.core.events import TransferFinished
from models.base import CausalLM, KVLayout
from models.load import load_model
from tests.models.builders import write_projected_folder
from tests.models.test_windows import write_windowed
from tests.workers.actor_doubles import Cluster, make_job, place, until
from tests.workers.doubles import BLOCK_TOKENS, begin, generate, make_engine, make_prompt, prefill
from tests.workers.staged_doubles import Group
from workers.block_rows import pool_rows
from workers.device_cache import DeviceCache
from workers.needed_state import prefix_parts, window_blocks

PROMPT = tuple((7 * i) % 91 + 2 for i in range(57))
BLOCKS = len(PROMPT) // BLOCK_TOKENS
HASHES = make_job("any", PROMPT).request.block_hashes


def windowed(folder: Path, name: str = "gemma2") -> CausalLM:
    write_projected_folder(folder) if name == "projected" else write_windowed(folder, name)
    return load_model(str(folder)).model


def expected(model: CausalLM, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    return generate(make_engine(64, BLOCK_TOKENS, model), make_prompt(prompt, 12), 12)


async def add(cluster: Cluster, worker: str, model: CausalLM, **changes: Any) -> Any:
    """A worker whose cache is full of garbage that would show."""
    added = await cluster.add(worker, model=model, **changes)
    for layer in added.cache.paged.layers:
        layer.fill_(1e3)
    return added


async def run(cluster: Cluster, name: str, prompt: tuple[int, ...], worker: str, source: str | None = None) -> list[int | None]:
    """The text, from a worker that pulls the prompt's full blocks where there is a source."""
    job = make_job(name, prompt, 12)
    fetched = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS if source else 0
    await cluster.submit(job, place(job, worker, "d0", fetched=fetched, source=source))
    return await cluster.output_of(name)


def reused(cluster: Cluster, name: str) -> int | None:
    return min(cluster.outputs[name], key=lambda output: output.index).reused_tokens


def moved_bytes(layout: KVLayout, blocks: int) -> int:
    """All blocks in global layers, and in window layers as many as the widest window sees back from their end."""
    tail = max(-(-max(1, window - 1) // BLOCK_TOKENS) for window in layout.windows if window is not None)
    global_layers = sum(not layout.has_window(layer) for layer in range(layout.num_layers))
    in_layer = blocks * global_layers + min(blocks, tail) * (layout.num_layers - global_layers)
    return in_layer * BLOCK_TOKENS * layout.bytes_per_token // layout.num_layers


@pytest.mark.parametrize(
    "name", ["mistral", "mistral-one-token", "mistral-wider-than-text", "qwen3-listed-layers", "gemma2", "projected"]
)
async def test_a_pull_moves_what_later_tokens_see(cluster: Cluster, tmp_path: Path, name: str) -> None:
    """From worker to worker to worker: the text is the same each time, and so is what is moved."""
    model = windowed(tmp_path, name)
    for worker in ("p0", "p1", "p2", "d0"):
        await add(cluster, worker, model)
    await run(cluster, "r0", PROMPT, "p0")
    longer = (*PROMPT[: BLOCKS * BLOCK_TOKENS], 5, 6, 7, 8, 9)
    for number in (1, 2):
        await cluster.workers[f"p{number}"].pull_blocks(f"t{number}", cluster.handles[f"p{number - 1}"], HASHES)
        assert await run(cluster, f"r{number}", longer, f"p{number}") == expected(model, longer)
        assert reused(cluster, f"r{number}") == BLOCKS * BLOCK_TOKENS
    await until(lambda: len(cluster.conductor.of(TransferFinished)) == 2)
    needed = moved_bytes(model.layout, BLOCKS)
    assert [event.transfer_bytes for event in cluster.conductor.of(TransferFinished)] == [needed, needed]
    whole = BLOCKS * BLOCK_TOKENS * model.layout.bytes_per_token
    assert (needed < whole) == (name != "mistral-wider-than-text")


async def test_a_shorter_prefix_is_computed_once_and_then_reused(cluster: Cluster, tmp_path: Path) -> None:
    """What a pull left behind is not missed in silence: a prompt that needs it computes it, for all that come after."""
    model = windowed(tmp_path)
    for worker in ("p0", "p1", "d0"):
        await add(cluster, worker, model)
    await run(cluster, "r0", PROMPT, "p0")
    assert await run(cluster, "r1", PROMPT, "p1", "p0") == expected(model)
    shorter = (*PROMPT[: 6 * BLOCK_TOKENS], 9, 8, 7)
    assert await run(cluster, "r2", shorter, "p1") == expected(model, shorter)
    assert reused(cluster, "r2") == 0
    assert await run(cluster, "r3", shorter, "p1") == expected(model, shorter)
    assert reused(cluster, "r3") == 6 * BLOCK_TOKENS
    assert await run(cluster, "r4", PROMPT, "p1") == expected(model)
    assert reused(cluster, "r4") == BLOCKS * BLOCK_TOKENS


async def test_a_longer_pull_goes_on_from_where_windows_are_whole(cluster: Cluster, tmp_path: Path) -> None:
    """A second pull brings the window state at the new end, and is offered again from there."""
    model = windowed(tmp_path)
    for worker in ("p0", "p1", "p2", "d0"):
        await add(cluster, worker, model)
    await run(cluster, "r0", PROMPT, "p0")
    p1, p2 = cluster.workers["p1"], cluster.workers["p2"]
    for number, depth in enumerate((8, BLOCKS)):
        await p1.pull_blocks(f"t{number}", cluster.handles["p0"], HASHES[:depth])
        assert p1.cache.match(HASHES) == depth
    assert p1.cache.match(HASHES[:6]) == 0
    await p2.pull_blocks("t2", cluster.handles["p1"], HASHES)
    assert p2.cache.match(HASHES) == BLOCKS
    assert await run(cluster, "r1", PROMPT, "p2") == expected(model)
    assert reused(cluster, "r1") == BLOCKS * BLOCK_TOKENS


async def test_a_worker_in_stages_pulls_blocks_in_all_layers(cluster: Cluster, tmp_path: Path) -> None:
    """It has no one place where window state could be put back. From a worker that has not all of it, it gets what is whole."""
    model = windowed(tmp_path)
    for worker in ("p0", "p1", "d0"):
        await add(cluster, worker, model)
    group = Group(cluster.fabric, tmp_path, 2)
    staged = await cluster.add("p2", build=group)
    await run(cluster, "r0", PROMPT, "p0")
    assert await run(cluster, "r1", PROMPT, "p2", "p0") == expected(model)
    assert [staged.cache.match(HASHES[:depth]) for depth in (1, 6, BLOCKS)] == [1, 6, BLOCKS]
    p1 = cluster.workers["p1"]
    await p1.pull_blocks("t1", cluster.handles["p2"], HASHES)
    assert [p1.cache.match(HASHES[:depth]) for depth in (1, 6, BLOCKS)] == [0, 0, BLOCKS]
    assert await p1.offer_blocks(HASHES, 0, "p2", staged.exchange.cuts) is None
    assert group.lost == []


def test_a_tier_gets_no_block_without_its_window_state(tmp_path: Path) -> None:
    """What was imported bare is written once it has been computed."""
    model = windowed(tmp_path)
    home, away = make_engine(64, BLOCK_TOKENS, model), make_engine(64, BLOCK_TOKENS, model)
    sequence = begin(home, make_prompt(PROMPT))
    prefill(home, sequence)
    bare = BLOCKS - window_blocks(model.layout, BLOCK_TOKENS)
    away.cache.import_prefix(HASHES, 0, lambda ids, skip: copy(home.cache, sequence.table[skip:BLOCKS], away.cache, ids), bare)
    assert away.cache.match(HASHES) == BLOCKS
    for first, held in ((0, 0), (bare - 1, 0), (bare, BLOCKS - bare)):
        with pool_rows(away.cache, HASHES, first) as rows:
            assert len(rows) == held
    assert generate(away, make_prompt(PROMPT[:40], 4), 4) == generate(home, make_prompt(PROMPT[:40], 4), 4)
    with pool_rows(away.cache, HASHES, 0) as rows, pool_rows(home.cache, HASHES, 0) as known:
        assert len(rows) == len(known) == BLOCKS
        for row, other in zip(rows, known, strict=True):
            np.testing.assert_allclose(row.view(np.float32), other.view(np.float32), atol=1e-4)
    home.finish(sequence)
    assert (home.cache.pinned, away.cache.pinned) == (0, 0)


def copy(source: DeviceCache, ids: list[int], target: DeviceCache, into: Any) -> None:
    target.paged.scatter(into, source.paged.gather(ids))


layouts = st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=6)


@given(windows=layouts, blocks=st.integers(1, 20), size=st.sampled_from([1, 4, 16]), data=st.data())
def test_a_prefix_has_what_any_token_after_it_sees(
    windows: list[int | None], blocks: int, size: int, data: st.DataObject
) -> None:
    """Each needed block of each layer once; what is left out, no token after the prefix sees; window layers go together."""
    layout = KVLayout("gqa", 1, len(windows), (2, 1, 16), torch.float32, tuple(windows))
    start = data.draw(st.integers(0, blocks - 1))
    parts = prefix_parts(layout, range(start, blocks), max(0, blocks - window_blocks(layout, size)))
    found = [(block, layer) for some, layers in parts for block in some for layer in layers]
    assert len(found) == len(set(found))
    seen = {
        (block, layer)
        for layer, window in enumerate(windows)
        for block in range(start, blocks)
        if window is None or (block + 1) * size + window - 2 >= blocks * size
    }
    with_windows = [layer for layer, window in enumerate(windows) if window is not None]
    needed = {block for block, layer in seen if layer in with_windows} | {blocks - 1}
    assert set(found) == seen | {(block, layer) for block in needed for layer in with_windows}
