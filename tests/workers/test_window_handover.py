"""Hand-overs of models with sliding windows: no byte more than the next token sees, and the same text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conductor.core.events import BlocksStored, HandoverFinished
from models.base import KVLayout
from models.folder import find_model
from models.kv_layout import StateKind, number_format
from models.load import load_model
from tests.models.builders import write_projected_folder
from tests.models.test_windows import WINDOW, write_windowed
from tests.workers.actor_doubles import Cluster, make_job, place, until
from tests.workers.doubles import BLOCK_TOKENS, begin, decode, filled_from, generate, make_engine, make_prompt, prefill
from workers.needed_state import needed_parts
from workers.sequence import KVSequence

PROMPT = tuple((7 * i) % 91 + 2 for i in range(57))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


def bytes_needed(kind: StateKind, tokens: int) -> int:
    """In whole blocks: of all tokens, or of those that the next one sees."""
    first = 0 if kind.window_tokens is None else max(0, tokens - kind.window_tokens + 1)
    blocks = 0 if first == tokens else -(-tokens // BLOCK_TOKENS) - first // BLOCK_TOKENS
    return blocks * BLOCK_TOKENS * kind.layers * kind.entry_bytes


@pytest.mark.parametrize(
    "name", ["mistral", "mistral-one-token", "mistral-wider-than-text", "qwen3-listed-layers", "gemma2", "projected"]
)
@pytest.mark.parametrize("length", [16, 56, 57])
async def test_a_hand_over_moves_what_the_layout_counts(cluster: Cluster, tmp_path: Path, name: str, length: int) -> None:
    """Global state whole, window state as far as the next token sees, computed now or found; greedy text is the same."""
    write_projected_folder(tmp_path) if name == "projected" else write_windowed(tmp_path, name)
    model, kinds = load_model(str(tmp_path)).model, find_model(str(tmp_path)).config.kv_states(number_format("fp32"))
    prompt = PROMPT[:length]
    expected = generate(make_engine(64, BLOCK_TOKENS, model), make_prompt(prompt, 30), 30)
    await cluster.add("p0", model=model)
    for number in range(2):  # again with the prompt cached at the prefill worker
        await cluster.add(f"d{number}", model=model)
        job = make_job(f"r{number}", prompt, 30)
        await cluster.submit(job, place(job, "p0", f"d{number}"))
        assert await cluster.output_of(job.request.id) == expected
    await until(lambda: len(cluster.conductor.of(HandoverFinished)) == 2)
    moved = [event.transfer_bytes for event in cluster.conductor.of(HandoverFinished)]
    needed = sum(bytes_needed(kind, length) for kind in kinds)
    assert moved == [needed, needed]
    everything = -(-length // BLOCK_TOKENS) * BLOCK_TOKENS * model.layout.bytes_per_token
    assert (needed < everything) == any(
        w is not None and (w == 1 or length - w + 1 >= BLOCK_TOKENS) for w in model.layout.windows
    )


async def test_what_came_in_part_is_not_offered_as_a_whole(cluster: Cluster, tmp_path: Path) -> None:
    """A decode worker without the windows' old state reports no block; where windows hide nothing it reports them all."""
    write_windowed(tmp_path, "gemma2")
    model = load_model(str(tmp_path)).model
    for worker in ("p0", "d0"):
        await cluster.add(worker, model=model)
    for name, prompt in (("long", PROMPT), ("short", tuple(reversed(PROMPT[:WINDOW])))):
        job = make_job(name, prompt, 12)
        await cluster.submit(job, place(job, "p0", "d0"))
        await cluster.output_of(name)
    short = make_job("short", tuple(reversed(PROMPT[:WINDOW]))).request.block_hashes
    told = cluster.conductor
    await until(lambda: any(event.stamp.source == "d0" for event in told.of(BlocksStored)))
    stored = [block for event in told.of(BlocksStored) if event.stamp.source == "d0" for block in event.blocks]
    assert tuple(stored[: len(short)]) == short
    assert not set(stored) & set(make_job("long", PROMPT).request.block_hashes)


def test_a_sequence_that_came_in_part_can_be_computed_again(tmp_path: Path) -> None:
    """Preempted, it goes on with the same text, from its own tokens."""
    write_windowed(tmp_path, "gemma2")
    model = load_model(str(tmp_path)).model
    expected = generate(make_engine(64, BLOCK_TOKENS, model), make_prompt(PROMPT, 12), 12)
    home, away = make_engine(64, BLOCK_TOKENS, model), make_engine(64, BLOCK_TOKENS, model)
    sequence, adopted = begin(home, make_prompt(PROMPT, 12)), away.adopt(make_prompt(PROMPT, 12))
    assert isinstance(adopted, KVSequence)
    first = prefill(home, sequence)
    with pytest.raises(ValueError, match="have not been received"):
        away.complete(adopted, first)
    for blocks, layers in needed_parts(model.layout, len(PROMPT), BLOCK_TOKENS, range(len(adopted.table)), range(4)):
        lying = home.cache.blocks(sequence.table[blocks.start : blocks.stop], layers)
        away.receive(adopted, blocks, filled_from(lying.copy()), layers)
    away.complete(adopted, first)
    decode(away, [adopted], 5)
    away.finish(adopted)
    again = away.begin_again(adopted)
    assert isinstance(again, KVSequence)
    assert again.computed == 0
    while again.computed < len(again.tokens) - 1:
        away.prefill_chunk(again, 16 if len(again.tokens) - 1 - again.computed > 16 else len(again.tokens) - 1 - again.computed)
    decode(away, [again], 6)
    assert again.tokens[len(PROMPT) :] == expected
    away.finish(again)
    home.finish(sequence)


layouts = st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=6)


@given(windows=layouts, tokens=st.integers(1, 80), size=st.sampled_from([1, 4, 16]), data=st.data())
def test_parts_are_exactly_what_the_next_token_sees(
    windows: list[int | None], tokens: int, size: int, data: st.DataObject
) -> None:
    """Each block of each layer once if any of its tokens is seen, and not at all otherwise."""
    layout = KVLayout("gqa", 1, len(windows), (2, 1, 16), torch.float32, tuple(windows))
    stop = -(-tokens // size)
    start = data.draw(st.integers(0, stop - 1))
    parts = needed_parts(layout, tokens, size, range(start, stop), range(len(windows)))
    found = [(block, layer) for blocks, layers in parts for block in blocks for layer in layers]
    seen = {
        (token // size, layer)
        for layer, window in enumerate(windows)
        for token in range(tokens)
        if (window is None or token > tokens - window) and token // size >= start
    }
    assert sorted(found) == sorted(seen)
