"""The contract between models and the workers that run them: one batch, one paged cache, one forward pass.

A batch holds several sequences, each with new tokens to compute (a prefill chunk, or one token of decode) on top of
context whose KV already lies in the cache. `forward` writes the new tokens' KV into the cache and returns the logits of
every sequence's last new token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.kv_layout import NumberFormat, StateKind


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Sequences laid end to end.

    token_ids: int64 [total_new_tokens]; query_lens and context_lens: one entry a sequence (new tokens; tokens already cached);
    block_tables: one list of cache block ids a sequence, long enough for context + new tokens. `all_logits` asks for logits
    of every new token, not of each sequence's last alone; without `logits` none are wanted, and a model may return none.
    `replay`: the new tokens' state is in the cache but for their
    window layers'; only that is written, computed as if no window state existed before them (bounded replay).
    """

    token_ids: Tensor
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    all_logits: bool = False
    logits: bool = True
    replay: bool = False


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The bytes of a token's KV in a paged cache: `elements` per layer, unpacked, each as wide as `dtype`.

    `windows`: how many tokens back each layer sees, None where all; empty where all layers do.
    """

    name: str
    version: int
    num_layers: int
    token_shape: tuple[int, ...]  # shape of one token's KV in one layer, e.g. (2, kv_heads, head_dim)
    dtype: torch.dtype
    windows: tuple[int | None, ...] = ()

    def has_window(self, layer: int) -> bool:
        return bool(self.windows) and self.windows[layer] is not None

    def first_seen(self, layer: int, tokens: int) -> int:
        """The earliest token whose state in a layer is of use to what follows `tokens` tokens."""
        window = self.windows[layer] if self.windows else None
        return 0 if window is None else max(0, tokens - window + 1)

    @property
    def elements(self) -> int:
        return math.prod(self.token_shape)

    @property
    def state(self) -> StateKind:
        kept_as = NumberFormat(str(self.dtype).removeprefix("torch."), self.dtype.itemsize * 8)
        return StateKind(self.name, self.num_layers, self.elements, kept_as)

    @property
    def bytes_per_token(self) -> int:
        return int(self.state.bytes_per_token)


class PagedKVCache:
    """KV of `num_blocks` blocks of `block_tokens` tokens: one tensor a layer, [num_blocks, block_tokens, *token_shape].

    Block ids are handed out by the worker's block pool; the cache only stores bytes. `held` are the layers of the layout that
    lie here, by default all.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_tokens: int,
        device: torch.device | str = "cpu",
        held: range | None = None,
    ) -> None:
        self.layout = layout
        self.held = range(layout.num_layers) if held is None else held
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        shape = (num_blocks, block_tokens, *layout.token_shape)
        # Zeros: attention multiplies unwritten slots by a weight of zero, and zero times NaN would not vanish.
        self.layers = [torch.zeros(shape, dtype=layout.dtype, device=device) for _ in self.held]

    def gather(self, block_ids: Sequence[int], layers: range | None = None) -> Tensor:
        """A contiguous copy [layers, blocks, block_tokens, *token_shape] of the given blocks."""
        index = torch.as_tensor(block_ids, dtype=torch.long, device=self.layers[0].device)
        chosen = self.held if layers is None else layers
        return torch.stack([self.layers[layer - self.held.start].index_select(0, index) for layer in chosen])

    def scatter(self, block_ids: Sequence[int], data: Tensor, layers: range | None = None) -> None:
        """Write what `gather` returned into the given blocks."""
        index = torch.as_tensor(block_ids, dtype=torch.long, device=self.layers[0].device)
        for row, layer in enumerate(self.held if layers is None else layers):
            kept = self.layers[layer - self.held.start]
            kept.index_copy_(0, index, data[row].to(kept))


class CausalLM(ABC):
    """A decoder-only language model over paged KV. `stages`: how many batches it computes at once, one after the other."""

    stages: int = 1
    vocab_size: int
    max_context: int
    layout: KVLayout

    @abstractmethod
    def forward(self, batch: ForwardBatch, cache: PagedKVCache, *, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Logits, float32 [sequences, vocab_size], of each sequence's last new token, or [new tokens, vocab_size].

        Writes the KV of all new tokens into `cache`. `on_layer(i)` is called when layer i's KV is complete for this batch, so
        that it can be sent while the next layer computes; the layer's own attention reads it afterwards.
        """

    def settle(self) -> None:
        """Wait until everything that `forward` has begun is done, `on_layer` included."""
        return

    def check_context(self, batch: ForwardBatch) -> None:
        lengths = zip(batch.context_lens, batch.query_lens, strict=False)  # a disagreement is refused later
        longest = max(context + new for context, new in lengths)
        if longest > self.max_context:
            raise ValueError(f"a sequence of {longest} tokens exceeds the model's context of {self.max_context}")
