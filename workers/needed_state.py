"""Which state of a prompt a decode worker needs: all of it in global layers, the last tokens' alone in sliding-window layers.

Window state that no later token sees stays on the worker that computed it. What a decode worker gets so is whole for the
sequence that it decodes and for no other, so it names none of that sequence's blocks. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from models.base import KVLayout


def needed_parts(layout: KVLayout, tokens: int, block_tokens: int, blocks: range, layers: range) -> list[tuple[range, range]]:
    """Of `blocks` in `layers`, those that the token after `tokens` tokens sees, as rectangles of (blocks, layers)."""
    seen = {layer: layout.first_seen(layer, tokens) for layer in layers}
    first = {layer: blocks.stop if token == tokens else token // block_tokens for layer, token in seen.items()}
    bounds = sorted({blocks.start, blocks.stop, *(block for block in first.values() if block in blocks)})
    return [
        (range(start, stop), run)
        for start, stop in pairwise(bounds)
        for run in _runs([layer for layer in layers if first[layer] <= start])
    ]


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Ascending numbers as ranges without gaps."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield range(numbers[start], numbers[end - 1] + 1)
            start = end
