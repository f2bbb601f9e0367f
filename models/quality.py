"""What a cheaper form of a model costs in quality: perplexity, and how often the most likely token stays the same.

A text is read once, in chunks, over a paged cache, with the text's own tokens as the continuation (teacher forcing). A KV
codec is applied to every token of every layer before that layer attends, so the figures hold for state that has been stored
or moved in that format everywhere, not only for a restored prefix. What is compared with what is the caller's choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.base import CausalLM, ForwardBatch, PagedKVCache
from models.kv_codec import KVCodec


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure measured on a sample, and its standard error."""

    value: float
    standard_error: float

    def at_most(self, limit: float) -> bool:
        """Whether the sample is consistent with a true value of at most `limit` (one-sided, two standard errors)."""
        return self.value - 2.0 * self.standard_error <= limit


@dataclass(frozen=True, slots=True)
class TextScore:
    """`losses`: of each token of a text but the first, in nats; `choices`: the most likely token at each of those places."""

    losses: Tensor
    choices: Tensor

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.double().mean()))

    def agreement(self, reference: TextScore) -> float:
        """The share of places at which both choose the same token."""
        return float((self.choices == reference.choices).double().mean())

    def rise(self, reference: TextScore) -> Estimate:
        """By what share the perplexity is above the reference's, with its standard error over the tokens of this text."""
        difference = (self.losses - reference.losses).double()
        share = math.expm1(float(difference.mean()))
        return Estimate(share, float(difference.std()) / math.sqrt(len(difference)) * (1.0 + share))


def score_text(
    model: CausalLM, tokens: Sequence[int], *, codec: str | None = None, chunk_tokens: int = 128, block_tokens: int = 64
) -> TextScore:
    """Read `tokens`, the KV kept in the number format `codec` (None: as it is). Raises `ValueError` for a text of one token."""
    if len(tokens) < 2:
        raise ValueError(f"the text has {len(tokens)} tokens; scoring needs two")
    table = list(range(-(-len(tokens) // block_tokens)))
    cache = PagedKVCache(model.layout, len(table), block_tokens)
    text = torch.tensor(tokens)
    losses, choices = [], []
    for start in range(0, len(tokens) - 1, chunk_tokens):
        stop = min(start + chunk_tokens, len(tokens) - 1)
        batch = ForwardBatch(text[start:stop], [stop - start], [start], [table], all_logits=True)
        logits = model.forward(batch, cache, on_layer=_Rounding(cache, codec, range(start, stop)))
        losses.append(F.cross_entropy(logits, text[start + 1 : stop + 1], reduction="none"))
        choices.append(logits.argmax(dim=-1))
    return TextScore(torch.cat(losses), torch.cat(choices))


class _Rounding:
    """Called when a layer's KV is written: replaces that of the tokens at `places` by what comes back from the codec."""

    def __init__(self, cache: PagedKVCache, codec: str | None, places: range) -> None:
        self._cache = cache
        self._codec = None if codec is None else KVCodec(codec, cache.layout.elements)
        self._places = slice(places.start, places.stop)

    def __call__(self, layer: int) -> None:
        if self._codec is None:
            return
        rows = self._cache.layers[layer].view(-1, self._codec.elements)[self._places]
        rows.copy_(self._codec.decode(self._codec.encode(rows), rows.dtype))
