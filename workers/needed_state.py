"""Which state of a prompt another worker needs: all of it in global layers, the last tokens' alone in sliding-window layers.

Window state that no later token sees stays on the worker that computed it. What a decode worker gets so is whole for the
sequence that it decodes and for no other, so it names none of that sequence's blocks. What a prefill worker pulls serves any
prompt that begins with all of it, and is named; its block pool knows which blocks came without window state. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from models.base import KVLayout


def needed_parts(layout: KVLayout, tokens: int, block_tokens: int, blocks: range, layers: range) -> list[tuple[range, range]]:
    """Of `blocks` in `layers`, those that the token after `tokens` tokens sees, as rectangles of (blocks, layers)."""
    seen = {layer: layout.first_seen(layer, tokens) for layer in layers}
    first = {layer: blocks.stop if token == tokens else token // block_tokens for layer, token in seen.items()}
    return _rectangles(first, blocks, layers)


def window_blocks(layout: KVLayout, block_tokens: int) -> int:
    """How many of a prefix's last blocks have window state that a token after it sees, in the layer that sees the farthest; at
    least one where there are windows, so that there is something to have."""
    reach = max((max(1, window - 1) for window in layout.windows if window is not None), default=0)
    return -(-reach // block_tokens)


def replayed_blocks(layout: KVLayout, block_tokens: int, windows: int | None = None) -> int:
    """How many of a prefix's last blocks are computed again to rebuild the window state that later tokens see: for exactness a
    window for each window layer (None), else `windows` of them (`models/window_state.py`)."""
    reaches = [window - 1 for window in layout.windows if window is not None]
    before = max(reaches, default=0) * (min(len(reaches), windows or len(reaches)) - 1)
    return window_blocks(layout, block_tokens) - (-before // block_tokens)


def prefix_parts(layout: KVLayout, blocks: range, bare: int) -> list[tuple[range, range]]:
    """`blocks`, those before `bare` without window layers, as rectangles of (blocks, layers). All window layers of a block or
    none: a block has its window state or has not."""
    layers = range(layout.num_layers)
    return _rectangles({layer: bare if layout.has_window(layer) else 0 for layer in layers}, blocks, layers)


def _rectangles(first: Mapping[int, int], blocks: range, layers: range) -> list[tuple[range, range]]:
    """Of `blocks` in `layers`, those from each layer's `first` on."""
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
