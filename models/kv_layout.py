"""How many bytes a token's cached state takes, exactly, for every kind of attention and every number format.

A model's state is a list of `StateKind`s: so many layers that each keep so many elements, for every token (global attention),
for every m-th token (compressed), or for the last W tokens only (sliding window). Its bytes are counted in whole numbers, with
the scales of the format, so that transfer estimates and capacity rest on what is really moved. What is shared by several
layers is counted where it is stored, once.

Element counts after the DeepSeek-V2 report, table 1: grouped-query attention 2*g*d a layer, multi-head latent attention
d_c + d_r a layer. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from models.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Elements of `bits` bits; with scales, one of `scale_bytes` for every `group` elements begun."""

    name: str
    bits: int
    group: int | None = None
    scale_bytes: int = 0

    def bytes_for(self, elements: int) -> int:
        """Bytes of `elements` numbers that are stored together, packed, padded to whole bytes."""
        scales = 0 if self.group is None else -(-elements // self.group) * self.scale_bytes
        return -(-elements * self.bits // 8) + scales


FORMATS = {
    known.name: known
    for known in (
        NumberFormat("fp32", 32),
        NumberFormat("bf16", 16),
        NumberFormat("fp16", 16),
        NumberFormat("fp8", 8, group=64, scale_bytes=1),  # e4m3, power-of-two scales
        NumberFormat("int8", 8, group=64, scale_bytes=2),  # symmetric, half-precision scales
        NumberFormat("fp4", 4, group=16, scale_bytes=1),  # e2m1, e4m3 scales
        NumberFormat("mxfp4", 4, group=32, scale_bytes=1),  # e2m1, power-of-two scales
    )
}


def number_format(name: str) -> NumberFormat:
    if name not in FORMATS:
        raise ModelFileError(f"KV format is {name!r}; allowed: {', '.join(FORMATS)}")
    return FORMATS[name]


def keeps_bits(name: str, kept_as: NumberFormat) -> bool:
    """Whether numbers `kept_as` one of the formats without scales come back from the format `name` as they were."""
    return number_format(name) in (kept_as, FORMATS["fp32"])


@dataclass(frozen=True, slots=True)
class StateKind:
    """What `layers` layers keep alike: `elements` numbers for each entry, an entry for every `tokens_per_entry` tokens.

    `window_tokens`: only the last so many tokens are kept; such state does not grow with the sequence.
    """

    name: str
    layers: int
    elements: int
    number_format: NumberFormat
    tokens_per_entry: int = 1
    window_tokens: int | None = None

    @property
    def entry_bytes(self) -> int:
        """Of one entry in one layer."""
        return self.number_format.bytes_for(self.elements)

    @property
    def bytes_per_token(self) -> Fraction:
        """What a token adds to all layers while it is kept."""
        return Fraction(self.layers * self.entry_bytes, self.tokens_per_entry)

    def bytes_at(self, tokens: int) -> int:
        """All layers of a sequence of `tokens` tokens; an entry counts once it is complete."""
        kept = tokens if self.window_tokens is None else min(tokens, self.window_tokens)
        return kept // self.tokens_per_entry * self.layers * self.entry_bytes


def grouped_query(layers: int, kv_heads: int, head_dim: int, kept_as: NumberFormat) -> StateKind:
    return StateKind("gqa", layers, 2 * kv_heads * head_dim, kept_as)


def latent(layers: int, rank: int, rope_dim: int, kept_as: NumberFormat) -> StateKind:
    return StateKind("mla", layers, rank + rope_dim, kept_as)


def sliding_window(layers: int, kv_heads: int, head_dim: int, kept_as: NumberFormat, window_tokens: int) -> StateKind:
    return StateKind("window", layers, 2 * kv_heads * head_dim, kept_as, window_tokens=window_tokens)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """A sequence's state, told apart by how it is reused: `global_per_token` grows and belongs into shared tiers;
    `window_bytes` is the most that window state takes in a sequence, and stays on its host."""

    global_per_token: Fraction
    window_bytes: int


def state_bytes(kinds: Sequence[StateKind]) -> StateBytes:
    grown = sum((kind.bytes_per_token for kind in kinds if kind.window_tokens is None), Fraction(0))
    window = sum(kind.bytes_at(kind.window_tokens) for kind in kinds if kind.window_tokens is not None)
    return StateBytes(grown, window)
