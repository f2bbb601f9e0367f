"""The engine answers the same whatever is reused, cut, batched or moved, and gives back every block."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from conductor.core.hashing import hash_blocks
from conductor.core.messages import SamplingParams
from models.load import load_model
from tests.workers.doubles import (
    BLOCK_TOKENS,
    ROOT,
    begin,
    decode,
    expected_output,
    filled_from,
    generate,
    make_engine,
    make_prompt,
    packed,
    prefill,
)
from workers.block_pool import OutOfBlocks
from workers.device_cache import DeviceCache
from workers.engine import Engine
from workers.sequence import KVSequence, Prompt

PROMPT = tuple((7 * i) % 91 for i in range(22))


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = make_engine()
    yield engine
    engine.cache.check()
    assert engine.cache.pinned == 0


def hand_over(source: Engine, target: Engine, prompt: Prompt, cuts: tuple[int, ...]) -> KVSequence:
    """Prefill on one engine, move the KV in parts cut at the given blocks, go on on the other."""
    sequence = begin(source, prompt)
    first = prefill(source, sequence)
    adopted = target.adopt(prompt)
    assert isinstance(adopted, KVSequence)
    bounds = (0, *cuts, len(sequence.table))
    for start, stop in pairwise(bounds):
        arrays = [array.copy() for array in source.cache.read(sequence.table[start:stop])]
        target.receive(adopted, range(start, stop), filled_from(arrays))
    target.complete(adopted, first)
    source.finish(sequence)
    return adopted


def test_output_without_reuse(engine: Engine) -> None:
    """On an empty cache nothing is reused and the model's own answer comes out."""
    sequence = begin(engine, make_prompt(PROMPT))
    assert sequence.reused_tokens == 0
    engine.finish(sequence)
    assert expected_output(PROMPT, 9) == generate(engine, make_prompt(PROMPT), 9)


def test_reuse_changes_nothing(engine: Engine) -> None:
    """The same prompt again reuses every full block before its last token and answers the same."""
    first = generate(engine, make_prompt(PROMPT), 9)
    sequence = begin(engine, make_prompt(PROMPT))
    assert sequence.reused_tokens == 20
    engine.finish(sequence)
    assert first == generate(engine, make_prompt(PROMPT), 9)


def test_the_last_prompt_token_is_always_computed(engine: Engine) -> None:
    """A prompt that is cached to its end still computes its last block for the logits."""
    prompt = make_prompt(PROMPT[:20])
    first = generate(engine, prompt, 1)
    sequence = begin(engine, prompt)
    assert sequence.reused_tokens == 16
    assert [prefill(engine, sequence)] == first
    engine.finish(sequence)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 22])
def test_chunks_change_nothing(engine: Engine, chunk: int) -> None:
    """A prompt computed in chunks of any size answers as in one shot."""
    assert expected_output(PROMPT, 6) == generate(engine, make_prompt(PROMPT), 6, chunk)


def test_a_batch_changes_nothing(engine: Engine) -> None:
    """Sequences of different lengths that decode together answer as each alone."""
    prompts = [PROMPT[:5], PROMPT[3:16], PROMPT, (1,)]
    sequences = [begin(engine, make_prompt(tokens)) for tokens in prompts]
    for sequence in sequences:
        prefill(engine, sequence, chunk=6)
    decode(engine, sequences, 7)
    outputs = [sequence.tokens[len(tokens) :] for sequence, tokens in zip(sequences, prompts, strict=True)]
    for sequence in sequences:
        engine.finish(sequence)
    assert outputs == [expected_output(tokens, 8) for tokens in prompts]


@pytest.mark.parametrize("cuts", [(), (2,), (1, 3, 5)])
def test_hand_over_changes_nothing(engine: Engine, cuts: tuple[int, ...]) -> None:
    """Decode on another engine, from KV moved in one or several parts, goes on exactly."""
    target = make_engine()
    sequence = hand_over(engine, target, make_prompt(PROMPT), cuts)
    decode(target, [sequence], 8)
    assert sequence.tokens[len(PROMPT) :] == expected_output(PROMPT, 9)
    target.finish(sequence)
    target.cache.check()
    assert target.cache.pinned == 0


def test_hand_over_spares_what_the_target_has(engine: Engine) -> None:
    """Blocks that the target has cached already are kept as they are."""
    target = make_engine()
    generate(target, make_prompt(PROMPT[:12]), 1)
    adopted = target.adopt(make_prompt(PROMPT))
    assert isinstance(adopted, KVSequence)
    assert (adopted.reused_tokens, target.missing_blocks(adopted)) == (12, [3, 4, 5])
    target.finish(adopted)
    sequence = hand_over(engine, target, make_prompt(PROMPT), (2,))
    decode(target, [sequence], 4)
    assert sequence.tokens[len(PROMPT) :] == expected_output(PROMPT, 5)
    target.finish(sequence)


def test_an_incomplete_hand_over_is_refused_and_leaves_nothing(engine: Engine) -> None:
    """A sequence with a hole in its KV cannot decode, and its blocks get no name."""
    adopted = engine.adopt(make_prompt(PROMPT))
    assert isinstance(adopted, KVSequence)
    with pytest.raises(ValueError, match="have not been received"):
        engine.complete(adopted, 1)
    engine.finish(adopted)
    assert engine.cache.match(make_prompt(PROMPT).hashes) == 0


def test_generated_blocks_are_reused(engine: Engine) -> None:
    """The next turn of a conversation finds prompt and answer in the cache."""
    answer = generate(engine, make_prompt(PROMPT), 11)
    following = (*PROMPT, *answer, 5, 6, 7)
    sequence = begin(engine, make_prompt(following))
    assert sequence.reused_tokens == 32
    engine.finish(sequence)
    assert expected_output(following, 3) == generate(engine, make_prompt(following), 3)


def test_blocks_generated_after_a_short_prompt_chain_to_the_root(engine: Engine) -> None:
    """A prompt shorter than a block still names its generated blocks as anybody would."""
    answer = generate(engine, make_prompt((3, 1)), 8)
    assert engine.cache.match(hash_blocks(ROOT, packed((3, 1, *answer)), BLOCK_TOKENS)) == 2


def test_a_preempted_sequence_goes_on_where_it_was(engine: Engine) -> None:
    """Blocks given back in the middle of decode are computed again, and the output is the same."""
    sequence = begin(engine, make_prompt(PROMPT))
    prefill(engine, sequence)
    decode(engine, [sequence], 4)
    engine.finish(sequence)
    engine.cache.evict_idle()
    again = engine.begin_again(sequence)
    assert isinstance(again, KVSequence)
    while again.computed < len(again.tokens) - 1:
        engine.prefill_chunk(again, min(8, len(again.tokens) - 1 - again.computed))
    decode(engine, [again], 4)
    assert again.tokens[len(PROMPT) :] == expected_output(PROMPT, 9)
    engine.finish(again)


def test_running_out_of_blocks_is_a_value() -> None:
    """A prompt that does not fit now says so and takes nothing."""
    engine = make_engine(num_blocks=7)
    sequence = begin(engine, make_prompt(PROMPT))
    assert engine.begin(make_prompt((9,) * 8)) == OutOfBlocks(needed=2, available=1)
    engine.finish(sequence)
    assert (engine.cache.pinned, engine.max_sequence_tokens) == (0, 28)


def test_a_full_block_without_room_stops_growth() -> None:
    """Decode asks for a block only at a block's end, and is told when there is none."""
    engine = make_engine(num_blocks=1)
    sequence = begin(engine, make_prompt((1, 2, 3)))
    prefill(engine, sequence)
    assert engine.grow(sequence)
    engine.decode_step([sequence])
    assert not engine.grow(sequence)
    engine.finish(sequence)


def test_blocks_exported_and_imported_by_hash_are_kept(engine: Engine) -> None:
    """A pulled prefix is cached on the target and serves its next prompt."""
    prompt = make_prompt(PROMPT)
    output = generate(engine, prompt, 5)
    target = make_engine()
    ids = engine.cache.acquire(prompt.hashes)

    def bring(first: int) -> None:
        fill = filled_from(engine.cache.read(ids[first:]))
        kept = target.cache.import_prefix(
            prompt.hashes, first, lambda into, skip: target.cache.fill(into, lambda blocks: fill(blocks, skip))
        )
        assert kept is None

    bring(2)
    assert target.cache.match(prompt.hashes) == 0, "its ancestors are missing"
    bring(0)
    engine.cache.release(ids)
    assert (target.cache.match(prompt.hashes), target.cache.pinned) == (5, 0)
    assert generate(target, prompt, 5) == output


def test_a_layer_is_announced_when_its_kv_is_complete(engine: Engine) -> None:
    """The hook sees every layer once a chunk, in order."""
    seen: list[int] = []
    sequence = begin(engine, make_prompt(PROMPT))
    engine.prefill_chunk(sequence, 8, seen.append)
    engine.prefill_chunk(sequence, 14, seen.append)
    engine.finish(sequence)
    assert seen == [0, 1, 0, 1]


def test_output_length_counts_earlier_attempts(engine: Engine) -> None:
    """A continued request counts what an earlier attempt has emitted."""
    sequence = begin(engine, make_prompt(PROMPT, emitted=3))
    prefill(engine, sequence)
    assert sequence.output_tokens == 4
    engine.finish(sequence)


@pytest.mark.slow
def test_the_default_model_answers_the_same_every_way() -> None:
    """Real weights: reuse, chunks, batch and hand-over leave the greedy output as it is."""
    torch.set_num_threads(1)
    loaded = load_model()
    text = "The scheduler keeps prefixes where they will be needed, and moves the rest. " * 12
    tokens = tuple(loaded.tokenizer.encode(text))[:150]
    prompt = Prompt(tokens, hash_blocks(ROOT, packed(tokens), 64), ROOT, SamplingParams(max_tokens=12))

    def fresh() -> Engine:
        return Engine(loaded.model, DeviceCache(loaded.model.layout, 16, 64))

    engine, target = fresh(), fresh()
    plain = generate(engine, prompt, 12)
    assert generate(engine, prompt, 12) == plain, "with reuse"
    assert generate(fresh(), prompt, 12, chunk=48) == plain, "in chunks"
    moved = hand_over(fresh(), target, prompt, (1,))
    other = begin(target, make_prompt(tokens[5:40], block_tokens=64))
    prefill(target, other)
    decode(target, [moved, other], 11)
    assert moved.tokens[len(tokens) :] == plain, "after a hand-over, in a batch"
