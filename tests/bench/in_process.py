"""The engine alone in this process: what the live path is compared with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

import torch

from conductor.core.hashing import KVNamespace, hash_blocks
from conductor.core.messages import SamplingParams
from models.load import load_model
from workers.block_pool import OutOfBlocks
from workers.device_cache import DeviceCache
from workers.engine import Engine
from workers.sequence import Prompt

BLOCK_TOKENS = 64
CHUNK_TOKENS = 512


@cache
def engine() -> Engine:
    """The default model with one thread, as a worker has it."""
    torch.set_num_threads(1)
    model = load_model().model
    return Engine(model, DeviceCache(model.layout, 128, BLOCK_TOKENS))


def first_token_s(tokens: Sequence[int]) -> float:
    """Seconds from a prompt to its first token."""
    root = KVNamespace(("bench",), BLOCK_TOKENS).seed
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    prompt = Prompt(tuple(tokens), hash_blocks(root, packed, BLOCK_TOKENS), root, SamplingParams(max_tokens=1))
    running = engine()
    started = time.perf_counter()
    sequence = running.begin(prompt)
    assert not isinstance(sequence, OutOfBlocks)
    logits = None
    while sequence.computed < len(tokens):
        logits = running.prefill_chunk(sequence, min(CHUNK_TOKENS, len(tokens) - sequence.computed))
    assert logits is not None
    running.first_token(sequence, logits)
    elapsed = time.perf_counter() - started
    running.finish(sequence)
    return elapsed
