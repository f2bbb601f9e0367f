"""Prompts of token ids made from a trace's hash ids: equal ids give equal tokens, in every process and on every machine.

The tokens of a block are drawn from a counter-based generator (Philox) keyed by the block's id alone, so nothing is
remembered between requests. A last partial block is the beginning of its block. Requests without prefix identity
get tokens of their own, keyed by their position in the trace.

Scaling. A scale shrinks the block, not only the prompt: a block of 512 tokens at scale 0.05 becomes one of 26, and every
full block stays whole. Two prompts share the same blocks at any scale, so hit ratios survive; the length of a prompt is off
from `scale * length` by at most half a token a block. A scale so small that a block would vanish keeps one token a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from traces.schema import TraceRequest

SHARED_STREAM = 0
LONE_STREAM = 1


@dataclass(frozen=True, slots=True)
class TokenRange:
    """The half-open range of token ids that prompts are drawn from; it should hold no special token."""

    low: int = 1_000
    high: int = 30_000

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"token range is {self.low}:{self.high}; allowed: LOW:HIGH with 0 <= LOW < HIGH")


def scaled(request: TraceRequest, scale: float) -> TraceRequest:
    """The request with its lengths and its block multiplied by `scale`; at least one token of each stays."""
    block_tokens = _scaled_tokens(request.block_tokens, scale)
    if not request.hash_ids:
        input_tokens = _scaled_tokens(request.input_tokens, scale)
    else:
        full_tokens = request.input_tokens // request.block_tokens * block_tokens
        tail_tokens = min(_scaled_tokens(request.tail_tokens, scale), block_tokens) if request.tail_tokens else 0
        input_tokens = full_tokens + tail_tokens
    return replace(
        request,
        input_tokens=input_tokens,
        output_tokens=_scaled_tokens(request.output_tokens, scale),
        block_tokens=block_tokens,
    )


def prompt_tokens(request: TraceRequest, index: int, tokens: TokenRange) -> list[int]:
    """Token ids of the prompt of `request`, the `index`-th of its trace."""
    if not request.hash_ids:
        return _draw(index, LONE_STREAM, request.input_tokens, tokens)
    prompt: list[int] = []
    for block_id in request.hash_ids:
        wanted = min(request.block_tokens, request.input_tokens - len(prompt))
        prompt += _draw(block_id, SHARED_STREAM, wanted, tokens)
    unnamed_tokens = request.input_tokens - len(prompt)
    return prompt + _draw(index, LONE_STREAM, unnamed_tokens, tokens)


def _scaled_tokens(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))


def _draw(key: int, stream: int, count: int, tokens: TokenRange) -> list[int]:
    generator = np.random.Philox(key=np.array([key, stream], dtype=np.uint64))
    raw = generator.random_raw(count)
    drawn: list[int] = (raw % np.uint64(tokens.high - tokens.low) + np.uint64(tokens.low)).tolist()
    return drawn
