"""Bounded replay: window state that was left elsewhere is computed again, for the same text, and harms no other sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models.base import CausalLM
from tests.workers.actor_doubles import Cluster, make_job, place
from tests.workers.doubles import BLOCK_TOKENS, begin, decode, generate, make_engine, make_prompt, prefill
from tests.workers.test_window_pulls import windowed
from workers.engine import Engine
from workers.needed_state import replayed_blocks, window_blocks

PROMPT = tuple((7 * i) % 91 + 2 for i in range(101))
BLOCKS = len(PROMPT) // BLOCK_TOKENS
FAMILIES = ["mistral", "gemma2", "qwen3-listed-layers", "projected"]


def counted(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each replay that the model computes has."""
    forward, replayed = model.forward, []

    def count(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.replay:
            replayed.append(len(batch.token_ids))
        return forward(batch, *args, **kwargs)

    monkeypatch.setattr(model, "forward", count)
    return replayed


def bare(model: CausalLM, blocks: int = BLOCKS, num_blocks: int = 64, replay_windows: int | None = None) -> Engine:
    """An engine that has so many blocks of the prompt without their window state, and garbage in its place."""
    home = make_engine(64, BLOCK_TOKENS, model)
    made = make_engine(num_blocks, BLOCK_TOKENS, model)
    engine = Engine(model, made.cache, replay_windows=replay_windows)
    sequence = begin(home, make_prompt(PROMPT))
    prefill(home, sequence)

    def fill(ids: Any, skip: int) -> None:
        data = home.cache.paged.gather(sequence.table[skip:blocks])
        for layer in range(model.layout.num_layers):
            if model.layout.has_window(layer):
                data[layer] = 1e3
        engine.cache.paged.scatter(ids, data)

    engine.cache.import_prefix(make_prompt(PROMPT).hashes[:blocks], 0, fill, blocks)
    assert engine.cache.match(make_prompt(PROMPT).hashes) == 0
    return engine


def rebuilt(engine: Engine, prompt: tuple[int, ...], count: int = 12) -> list[int]:
    sequence = begin(engine, make_prompt(prompt, count))
    if sequence.spare:
        engine.rebuild(sequence)
    prefill(engine, sequence, 16)
    decode(engine, [sequence], count - 1)
    engine.finish(sequence)
    assert engine.cache.pinned == 0
    engine.cache.check()
    return sequence.tokens[len(prompt) :]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prefix_without_window_state_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As many windows as there are window layers are replayed, once; then the end of the prefix is whole."""
    model = windowed(tmp_path, name)
    expected = generate(make_engine(64, BLOCK_TOKENS, model), make_prompt(PROMPT, 12), 12)
    engine, replayed = bare(model), counted(model, monkeypatch)
    assert [rebuilt(engine, PROMPT) for _ in range(2)] == [expected, expected]
    layers = sum(map(model.layout.has_window, range(model.layout.num_layers)))
    tail = -(-19 // BLOCK_TOKENS)
    assert replayed == [(tail - (-19 * (layers - 1) // BLOCK_TOKENS)) * BLOCK_TOKENS]
    hashes = make_prompt(PROMPT).hashes
    assert (engine.cache.match(hashes), engine.cache.match(hashes[: BLOCKS - 1])) == (BLOCKS, 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_fewer_windows_are_replayed_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The fewer, the larger the error in the logits; global state is left alone."""
    model = windowed(tmp_path, name)
    exact = make_engine(64, BLOCK_TOKENS, model)
    expected = exact.prefill_chunk(begin(exact, make_prompt(PROMPT)), len(PROMPT))
    assert expected is not None
    tail, replayed, errors = window_blocks(model.layout, BLOCK_TOKENS), counted(model, monkeypatch), []
    for windows in (1, 2, None):
        engine = bare(model, replay_windows=windows)
        cached = [layer.clone() for layer in engine.cache.paged.layers]
        sequence = begin(engine, make_prompt(PROMPT))
        assert sequence.computed == BLOCKS * BLOCK_TOKENS
        engine.rebuild(sequence)
        for layer, before in enumerate(cached):
            if not model.layout.has_window(layer):
                assert torch.equal(engine.cache.paged.layers[layer][sequence.table[:BLOCKS]], before[sequence.table[:BLOCKS]])
        logits = engine.prefill_chunk(sequence, 1)
        assert logits is not None
        errors.append(float((logits - expected).norm() / expected.norm()))
    print(f"{name}: relative error of logits after the replay of 1, 2 and all windows: {errors}")
    assert errors[0] > errors[1] >= errors[2]
    assert errors[2] < 1e-3
    assert replayed[0] == tail * BLOCK_TOKENS < replayed[1] <= replayed[2]


def test_a_rebuild_leaves_running_sequences_alone(tmp_path: Path) -> None:
    """A shorter prefix is rebuilt from blocks that a longer one reads meanwhile, then a longer one again."""
    model = windowed(tmp_path)
    shorter = (*PROMPT[: 22 * BLOCK_TOKENS], 5, 6, 7)
    expected = [generate(make_engine(64, BLOCK_TOKENS, model), make_prompt(p, 12), 12) for p in (PROMPT, shorter)]
    engine = bare(model)
    running = begin(engine, make_prompt(PROMPT, 12))
    waiting = begin(engine, make_prompt(PROMPT, 12))
    engine.rebuild(running)
    prefill(engine, running)
    other = begin(engine, make_prompt(shorter, 12))
    for sequence in (other, waiting):
        assert sequence.spare
        engine.rebuild(sequence)
    prefill(engine, other)
    prefill(engine, waiting)
    decode(engine, [running, other, waiting], 11)
    assert running.tokens[len(PROMPT) :] == waiting.tokens[len(PROMPT) :] == expected[0]
    assert other.tokens[len(shorter) :] == expected[1]
    for sequence in (running, other, waiting):
        engine.finish(sequence)
    engine.cache.check()
    assert engine.cache.pinned == 0


@pytest.mark.parametrize(("blocks", "num_blocks"), [(BLOCKS, BLOCKS + 2), (8, 64)], ids=["no room", "no gain"])
def test_where_a_rebuild_does_not_pay_the_prefix_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, num_blocks: int
) -> None:
    model = windowed(tmp_path)
    expected = generate(make_engine(64, BLOCK_TOKENS, model), make_prompt(PROMPT, 4), 4)
    engine, replayed = bare(model, blocks, num_blocks), counted(model, monkeypatch)
    assert rebuilt(engine, PROMPT, 4) == expected
    assert replayed == []


async def test_a_worker_rebuilds_what_a_pull_left_behind(cluster: Cluster, tmp_path: Path) -> None:
    """A prompt that shares most of a pulled prefix reuses that and is handed over whole; so it is where that was pulled from
    there."""
    model = windowed(tmp_path)
    for worker in ("p0", "p1", "p2", "d0"):
        added = await cluster.add(worker, model=model)
        for layer in added.cache.paged.layers:
            layer.fill_(1e3)
    shared = 22 * BLOCK_TOKENS
    for name, prompt, worker, fetched, source in (
        ("r0", PROMPT, "p0", 0, None),
        ("r1", PROMPT, "p1", BLOCKS * BLOCK_TOKENS, "p0"),
        ("r2", (*PROMPT[:shared], 5, 6, 7), "p1", 0, None),
        ("r3", (*PROMPT[: shared - 8], 7, 6, 5), "p2", shared - 8, "p1"),
    ):
        job = make_job(name, prompt, 12)
        await cluster.submit(job, place(job, worker, "d0", fetched=fetched, source=source))
        assert await cluster.output_of(name) == generate(make_engine(64, BLOCK_TOKENS, model), make_prompt(prompt, 12), 12)
    reused = [min(cluster.outputs[name], key=lambda output: output.index).reused_tokens for name in ("r2", "r3")]
    assert reused == [shared, shared - 8]
    assert replayed_blocks(model.layout, BLOCK_TOKENS) < shared // BLOCK_TOKENS
