"""Test doubles of the workers: a model whose next token depends on every KV entry that it reads, and small builders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from conductor.core.hashing import hash_blocks
from conductor.core.messages import SamplingParams
from models.base import CausalLM, ForwardBatch, KVLayout, PagedKVCache
from workers.device_cache import DeviceCache, Fill
from workers.engine import Engine
from workers.kv_store.records import HEADER_BYTES
from workers.kv_store.settings import StoreSettings
from workers.kv_transfer.blocks import KVArray, KVBlocks
from workers.sequence import KVSequence, Prompt

BLOCK_TOKENS = 4
ROOT = 12345


class ChainModel(CausalLM):
    """Integer arithmetic in float64: exact, cheap, and wrong at once when a single KV entry is.

    KV of a token: (token, position) in layer 0 and their mixture in layer 1. The next token is a hash over the whole context as
    read back through the block table.
    """

    def __init__(self, vocab_size: int = 997, max_context: int = 4096) -> None:
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.layout = KVLayout("chain", 1, 2, (2,), torch.float64)
        self.forwards = 0

    def forward(self, batch: ForwardBatch, cache: PagedKVCache, *, on_layer: Callable[[int], None] | None = None) -> Tensor:
        self.forwards += 1
        size, offset = cache.block_tokens, 0
        tokens = batch.token_ids.tolist()
        logits = torch.zeros(len(batch.query_lens), self.vocab_size)
        for layer in range(2):
            offset = 0
            for new, context, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
                for step in range(new):
                    position = context + step
                    entry = (tokens[offset + step], position) if layer == 0 else (tokens[offset + step] * 31 + position, 7)
                    cache.layers[layer][table[position // size], position % size] = torch.tensor(entry, dtype=torch.float64)
                offset += new
            if on_layer is not None:
                on_layer(layer)
        for row, (new, context, table) in enumerate(zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True)):
            logits[row, self._next(cache, table, context + new)] = 1.0
        return logits

    def _next(self, cache: PagedKVCache, table: Sequence[int], length: int) -> int:
        blocks = -(-length // cache.block_tokens)
        entries = [layer[list(table[:blocks])].flatten(0, 1)[:length].numpy().astype(np.int64) for layer in cache.layers]
        state = 17
        for (token, position), (mixture, mark) in zip(*entries, strict=True):
            assert mixture == token * 31 + position
            assert mark == 7
            state = (state * 1009 + int(token) * 31 + int(position)) % 1_000_003
        return state % self.vocab_size


def expected_output(prompt: Sequence[int], count: int, vocab_size: int = 997) -> list[int]:
    """What `ChainModel` answers, computed without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        state = 17
        for position, token in enumerate(tokens):
            state = (state * 1009 + token * 31 + position) % 1_000_003
        tokens.append(state % vocab_size)
    return tokens[len(prompt) :]


def packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def make_prompt(tokens: Sequence[int], max_tokens: int = 8, block_tokens: int = BLOCK_TOKENS, emitted: int = 0) -> Prompt:
    hashes = hash_blocks(ROOT, packed(tokens), block_tokens)
    return Prompt(tuple(tokens), hashes, ROOT, SamplingParams(max_tokens=max_tokens), emitted)


def make_engine(num_blocks: int = 32, block_tokens: int = BLOCK_TOKENS, model: CausalLM | None = None) -> Engine:
    model = ChainModel() if model is None else model
    return Engine(model, DeviceCache(model.layout, num_blocks, block_tokens))


def begin(engine: Engine, prompt: Prompt) -> KVSequence:
    sequence = engine.begin(prompt)
    assert isinstance(sequence, KVSequence)
    return sequence


def prefill(engine: Engine, sequence: KVSequence, chunk: int = 512) -> int:
    """Compute the rest of the prompt by chunk; the first token."""
    logits = None
    while sequence.computed < len(sequence.tokens):
        logits = engine.prefill_chunk(sequence, min(chunk, len(sequence.tokens) - sequence.computed))
    assert logits is not None
    return engine.first_token(sequence, logits).token_id


def decode(engine: Engine, sequences: Sequence[KVSequence], steps: int) -> None:
    for _ in range(steps):
        assert all(engine.grow(sequence) for sequence in sequences)
        engine.decode_step(sequences)


def generate(engine: Engine, prompt: Prompt, count: int, chunk: int = 512) -> list[int]:
    """The whole output of one request on one engine, which keeps nothing pinned."""
    sequence = begin(engine, prompt)
    prefill(engine, sequence, chunk)
    decode(engine, [sequence], count - 1)
    output = sequence.tokens[len(prompt.tokens) :]
    engine.finish(sequence)
    return output


def filled_from(arrays: Sequence[KVArray]) -> Fill:
    """What brings bytes that lie here, one array a layer."""

    def fill(into: KVBlocks, skip: int) -> None:
        for layer, array in enumerate(arrays):
            into.fill(layer, array[skip : skip + len(into.ids)])

    return fill


def scarce_tiers(name: str, root: Path, host: int, disk: int, shared: int, **changes: Any) -> StoreSettings:
    """All three tiers below the device, with room for so many of a chain model's blocks each."""
    record_bytes = HEADER_BYTES + BLOCK_TOKENS * 32
    return StoreSettings(
        deployment=f"{name}-{uuid4().hex}",
        host_bytes=host * record_bytes,
        disk_directory=root / "disk",
        disk_bytes=disk * record_bytes,
        shared_paths=(str(root / "shared"),),
        shared_bytes=shared * record_bytes,
        **changes,
    )


def roomy_tiers(root: Path, **changes: Any) -> StoreSettings:
    """All three tiers below the device, with room for everything that a test keeps."""
    return StoreSettings(
        deployment=f"test-{uuid4().hex}",
        host_bytes=1 << 20,
        disk_directory=root / "disk",
        disk_bytes=1 << 20,
        shared_paths=(str(root / "shared"),),
        shared_bytes=1 << 20,
        **changes,
    )
