"""Guessed tokens save steps and change nothing: not what is drawn, not what is cached, not when a request ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from conductor.core.messages import SamplingParams
from models.load import load_model
from models.sampling import SampledToken
from tests.models.builders import write_tiny_folder
from tests.workers.actor_doubles import Cluster, make_job, place
from tests.workers.doubles import ChainModel, begin, expected_output, generate, make_engine, make_prompt, prefill
from workers.block_pool import OutOfBlocks
from workers.engine import Engine, confirmed
from workers.sequence import KVSequence, Prompt

PROMPT = (1, 0, 1, 1, 0, 1, 0)


def speculate(engine: Engine, sequences: list[KVSequence], count: int, lookahead: int) -> int:
    """Until each sequence has `count` tokens of output or a few more; the number of steps."""
    steps = 0
    while behind := [sequence for sequence in sequences if sequence.output_tokens < count]:
        assert all(engine.grow(sequence) for sequence in behind)
        for sequence, drawn in zip(behind, engine.speculative_step(behind, lookahead), strict=True):
            for token in drawn[1:]:
                engine.accept(sequence, token)
        steps += 1
    return steps


def output(sequence: KVSequence, count: int) -> list[int]:
    return sequence.tokens[len(sequence.prompt.tokens) :][:count]


@pytest.mark.parametrize("lookahead", [1, 2, 5, 16])
def test_greedy_output_is_that_of_single_steps(lookahead: int) -> None:
    """With two tokens guesses are often right and often wrong; both leave the answer as it was, in fewer steps."""
    engine = make_engine(64, model=ChainModel(vocab_size=2))
    sequences = [begin(engine, make_prompt(PROMPT, 60)), begin(engine, make_prompt(PROMPT[2:], 60))]
    for sequence in sequences:
        prefill(engine, sequence)
    steps = speculate(engine, sequences, 50, lookahead)
    assert [output(sequence, 50) for sequence in sequences] == [
        expected_output(PROMPT, 50, vocab_size=2),
        expected_output(PROMPT[2:], 50, vocab_size=2),
    ]
    assert steps < 45
    for sequence in sequences:
        engine.finish(sequence)
    engine.cache.check()
    assert engine.cache.pinned == 0


def test_what_was_computed_after_a_wrong_guess_is_never_cached() -> None:
    """Blocks named while guessing serve the next request as if there had been no guesses."""
    engine = make_engine(64, model=ChainModel(vocab_size=2))
    sequence = begin(engine, make_prompt(PROMPT, 60))
    prefill(engine, sequence)
    speculate(engine, [sequence], 40, 4)
    longer = tuple(sequence.tokens[:40])
    engine.finish(sequence)
    again = begin(engine, make_prompt(longer))
    assert again.reused_tokens == 36
    engine.finish(again)
    assert generate(engine, make_prompt(longer), 9) == expected_output(longer, 9, vocab_size=2)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_real_model_draws_the_same_with_and_without_guesses(tmp_path: Path, temperature: float) -> None:
    """Greedy and seeded draws alike: the draw of a position depends on its seed and logits alone."""
    write_tiny_folder(tmp_path, "llama", head_dim=16, vocab_size=24, eos_token_id=None)
    model = load_model(str(tmp_path)).model
    rules = SamplingParams(max_tokens=80, temperature=temperature, seed=5)
    tokens = (3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4)
    results, steps = [], []
    for lookahead in (0, 4):
        engine = make_engine(32, 16, model)
        sequence = begin(engine, Prompt(tokens, (), 0, rules))
        prefill(engine, sequence)
        steps.append(speculate(engine, [sequence], 80, lookahead))
        results.append(output(sequence, 80))
        engine.finish(sequence)
    assert results[0] == results[1]
    assert steps[0] == 79
    assert steps[1] <= steps[0]


def test_guesses_keep_to_the_blocks_that_a_sequence_has() -> None:
    """A step never needs more room than one token: guesses take what the last block has left."""
    engine = make_engine(8, model=ChainModel(vocab_size=2))
    sequence = begin(engine, make_prompt(PROMPT, 60))
    prefill(engine, sequence)
    while engine.grow(sequence):
        for token in engine.speculative_step([sequence], 16)[0][1:]:
            engine.accept(sequence, token)
        assert sequence.computed <= len(sequence.table) * engine.cache.block_tokens
    assert len(sequence.tokens) == 8 * 4 + 1
    assert sequence.tokens[len(PROMPT) :] == expected_output(PROMPT, 26, vocab_size=2)
    engine.finish(sequence)


def test_penalties_are_not_guessed_for() -> None:
    """A penalty depends on what was drawn before, so such a sequence goes step by step."""
    engine = make_engine(64, model=ChainModel(vocab_size=2))
    rules = SamplingParams(max_tokens=60, repetition_penalty=1.3)
    sequence = engine.begin(Prompt(PROMPT, (), 0, rules))
    assert not isinstance(sequence, OutOfBlocks)
    prefill(engine, sequence)
    assert speculate(engine, [sequence], 20, 8) == 19
    engine.finish(sequence)


def test_tokens_hold_up_to_the_first_wrong_guess() -> None:
    drawn = [SampledToken(token) for token in (5, 6, 7, 8)]
    assert confirmed([5, 6, 9], drawn) == drawn[:3]
    assert confirmed([5, 6, 7], drawn) == drawn
    assert confirmed([1, 6, 7], drawn) == drawn[:1]
    assert confirmed([], drawn[:1]) == drawn[:1]


@pytest.mark.parametrize("max_tokens", [1, 2, 17, 40])
async def test_a_decode_worker_that_guesses_answers_the_same(max_tokens: int) -> None:
    """Every token once, in order, up to the request's last one, although more may have been drawn."""
    cluster = Cluster()
    try:
        await cluster.add("p0", model=ChainModel(vocab_size=2))
        await cluster.add("d0", model=ChainModel(vocab_size=2), speculative_tokens=6)
        jobs = [make_job(f"r{i}", PROMPT[i:], max_tokens) for i in range(3)]
        await asyncio.gather(*(cluster.submit(each, place(each, "p0", "d0")) for each in jobs))
        for i, each in enumerate(jobs):
            expected = expected_output(PROMPT[i:], max_tokens, vocab_size=2)
            assert await cluster.output_of(each.request.id) == expected
            assert len(cluster.outputs[each.request.id]) == max_tokens
    finally:
        await cluster.close()
