"""Multi-head latent attention over a paged cache, in the two forms that give the same result (DeepSeek-V2 report, section 2.1).

A token's cached entry is its latent c, normed, and one rotary key shared by all heads: [kv_rank + rope_dim].

- naive: keys and values of every head are expanded from the latents of the context, then attention is plain;
- absorbed: the expansion moves to the other side. Queries are carried into latent space, all heads attend to the entries
  themselves, as to a single KV head, and what they gather is carried back.

Naive pays for the expansion of the whole context once, absorbed for longer dot products at every query. Decode is always
absorbed; a prefill chunk takes the form with the fewer multiplications unless told otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from models.paged_attention import BatchPlan, ChunkWork, DecodeWork, gather_contexts


class Form(Enum):
    CHEAPER = "cheaper"
    NAIVE = "naive"
    ABSORBED = "absorbed"


@dataclass(frozen=True, slots=True)
class LatentShape:
    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    scale: float  # of the logits

    def naive_is_cheaper(self, queries: int, context: int) -> bool:
        """Whether expanding the context's keys and values costs less than attending in latent space."""
        plain = self.nope_dim + self.value_dim
        naive = context * self.rank * plain + queries * context * (plain + self.rope_dim)
        absorbed = queries * self.rank * plain + queries * context * (2 * self.rank + self.rope_dim)
        return naive < absorbed


@dataclass(frozen=True, slots=True)
class Expansion:
    """A layer's way from latents to heads: keys [heads, nope_dim, rank] and values [heads, value_dim, rank]."""

    keys: Tensor
    values: Tensor


def split_expansion(kv_b: Tensor, shape: LatentShape) -> Expansion:
    """Views of the up-projection [heads * (nope_dim + value_dim), rank]."""
    heads = kv_b.view(shape.heads, shape.nope_dim + shape.value_dim, shape.rank)
    return Expansion(heads[:, : shape.nope_dim], heads[:, shape.nope_dim :])


def write_entries(layer: Tensor, slots: Tensor, latents: Tensor, rope_keys: Tensor) -> None:
    """Put the entries of new tokens at `slots` of a layer's cache."""
    layer.flatten(0, 1)[slots] = torch.cat((latents, rope_keys), dim=-1).to(layer.dtype)


def attend_latent(
    queries: Tensor, layer: Tensor, plan: BatchPlan, shape: LatentShape, expansion: Expansion, form: Form = Form.CHEAPER
) -> Tensor:
    """Attention of `queries` [tokens, heads, nope_dim + rope_dim] over each sequence's context: [tokens, heads, value_dim]."""
    out = queries.new_empty(*queries.shape[:2], shape.value_dim)
    for chunk in plan.chunks:
        rows = slice(chunk.start, chunk.stop)
        naive = (
            shape.naive_is_cheaper(chunk.stop - chunk.start, chunk.run.tokens) if form is Form.CHEAPER else form is Form.NAIVE
        )
        attend = _chunk_naive if naive else _chunk_absorbed
        out[rows] = attend(queries[rows], layer, chunk, shape, expansion)
    if plan.decode is not None:
        out[plan.decode.rows] = _decode_absorbed(queries[plan.decode.rows], layer, plan.decode, shape, expansion)
    return out


def _chunk_naive(queries: Tensor, layer: Tensor, chunk: ChunkWork, shape: LatentShape, expansion: Expansion) -> Tensor:
    entries = chunk.run.read(layer).to(queries.dtype)
    latents, rope_keys = entries.tensor_split((shape.rank,), dim=-1)
    nope_keys = latents @ expansion.keys.mT
    keys = torch.cat((nope_keys, rope_keys.expand(shape.heads, -1, -1)), dim=-1)
    values = latents @ expansion.values.mT
    out = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=shape.scale,
    )
    return out[0].transpose(0, 1)


def _chunk_absorbed(queries: Tensor, layer: Tensor, chunk: ChunkWork, shape: LatentShape, expansion: Expansion) -> Tensor:
    entries = chunk.run.read(layer).to(queries.dtype)[None, None]
    carried = _carry_in(queries, shape, expansion)
    out = F.scaled_dot_product_attention(
        carried.transpose(0, 1)[None],
        entries,
        entries[..., : shape.rank],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=shape.scale,
        enable_gqa=True,
    )
    return _carry_out(out[0].transpose(0, 1), expansion)


def _decode_absorbed(queries: Tensor, layer: Tensor, work: DecodeWork, shape: LatentShape, expansion: Expansion) -> Tensor:
    entries = gather_contexts(layer, work).to(queries.dtype)[:, None]
    carried = _carry_in(queries, shape, expansion)[:, None]
    out = F.scaled_dot_product_attention(carried, entries, entries[..., : shape.rank], attn_mask=work.mask, scale=shape.scale)
    return _carry_out(out[:, 0], expansion)


def _carry_in(queries: Tensor, shape: LatentShape, expansion: Expansion) -> Tensor:
    """Queries [tokens, heads, ...] in latent space, with their rotary part: [tokens, heads, rank + rope_dim]."""
    nope, rope = queries.tensor_split((shape.nope_dim,), dim=-1)
    latent = (nope.transpose(0, 1) @ expansion.keys).transpose(0, 1)
    return torch.cat((latent, rope), dim=-1)


def _carry_out(gathered: Tensor, expansion: Expansion) -> Tensor:
    """What heads gathered in latent space, [tokens, heads, rank], as their values."""
    return (gathered.transpose(0, 1) @ expansion.values.mT).transpose(0, 1)
