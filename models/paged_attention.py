"""Grouped-query attention over a paged KV cache.

A `BatchPlan` is made once a forward pass and serves every layer. It lays the batch out in two kinds of work:

- sequences with one new token (decode) are computed together: their blocks are gathered into one padded
  [sequences, context] tensor, and the query heads that share a KV head become rows of one small product;
- sequences with more new tokens (a prefill chunk) are computed one after another against their own context: by the native
  kernel, which reads keys and values where they lie, tile by tile, once for all query heads that share them; else by torch.

Layers with a sliding window have a plan of their own, which leaves out the blocks that no new token sees any more.
A sequence whose blocks lie side by side in the cache is read through a view; only scattered blocks are copied.
Layout of one layer's cache: [blocks, block_tokens, 2, kv_heads, head_dim], keys first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from models import native_kernels
from models.base import ForwardBatch, PagedKVCache
from models.native_kernels import Kernels, Seen


@dataclass(frozen=True, slots=True)
class BlockRun:
    """The blocks that hold one sequence's first `tokens` tokens: `first` when they lie side by side, else `index`."""

    tokens: int
    first: int | None
    index: Tensor | None

    def read(self, layer: Tensor) -> Tensor:
        """[tokens, *token_shape] of a layer's cache; a view where possible."""
        if self.first is None:
            assert self.index is not None
            return layer.index_select(0, self.index).flatten(0, 1)[: self.tokens]
        blocks = -(-self.tokens // layer.shape[1])
        return layer[self.first : self.first + blocks].flatten(0, 1)[: self.tokens]


@dataclass(frozen=True)
class ChunkWork:
    """One sequence with several new tokens: rows `start..stop` of the batch, the last of `run.tokens` tokens of context.

    `seen` says to the native kernel what `mask` says to torch, which is None when the chunk starts its sequence and no window
    cuts it, so that plain causal attention is right. A mask is made when it is first asked for: it grows with the context.
    """

    start: int
    stop: int
    run: BlockRun
    seen: Seen
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def mask(self) -> Tensor | None:
        hidden = _hidden(self.stop - self.start, self.seen)
        return None if hidden is None else _minus_infinity(hidden, self.dtype).to(self.device)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """All sequences with one new token, which sees tokens `first` to `lengths` of the blocks in its row of `tables`.

    `run` replaces `tables` when there is one sequence; `mask` [sequences, 1, 1, context] hides the padding and what lies before
    the window; None when there is neither.
    """

    rows: Tensor
    tables: Tensor
    first: Tensor
    lengths: Tensor
    run: BlockRun | None
    max_tokens: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """`positions`: of each new token in its sequence; `slots`: where its KV goes, counted in tokens over the whole cache;
    `last_rows`: each sequence's last new token."""

    positions: Tensor
    slots: Tensor
    last_rows: Tensor
    chunks: tuple[ChunkWork, ...]
    decode: DecodeWork | None

    @property
    def decode_only(self) -> bool:
        return not self.chunks


def plan_batch(
    batch: ForwardBatch,
    cache: PagedKVCache,
    dtype: torch.dtype,
    window: int | None = None,
    padded_blocks: int | None = None,
) -> BatchPlan:
    """Lay out `batch`, for layers that see `window` tokens back. Raises `ValueError` when its lengths disagree or a block table
    is too short or out of range. `padded_blocks`: how many blocks a decoding sequence is laid out with, whatever it has, so
    that all plans of as many sequences have the same shapes."""
    _check_batch(batch, cache)
    device, size = cache.layers[0].device, cache.block_tokens
    chunks, single = [], []
    row = 0
    for new, seen in zip(batch.query_lens, _seen(batch, size, window), strict=True):
        if new == 1:
            single.append((row, seen))
        else:
            run = _block_run(seen.table, seen.total, size, device)
            facts = Seen(torch.tensor(seen.table), seen.total, seen.first, window)
            chunks.append(ChunkWork(row, row + new, run, facts, dtype, device))
        row += new
    positions, slots = _places(batch, size)
    decode = _decode_work(single, cache, dtype, padded_blocks) if single else None
    last_rows = torch.as_tensor(batch.query_lens).cumsum(0) - 1
    return BatchPlan(positions.to(device), slots.to(device), last_rows.to(device), tuple(chunks), decode)


def _places(batch: ForwardBatch, size: int) -> tuple[Tensor, Tensor]:
    """The position of each new token in its sequence, and the slot of its KV."""
    sequences = list(zip(batch.context_lens, batch.query_lens, batch.block_tables, strict=True))
    if max(batch.query_lens) == 1:
        slots = [table[context // size] * size + context % size for context, _, table in sequences]
        return torch.tensor(batch.context_lens), torch.tensor(slots)
    positions = [torch.arange(context, context + new) for context, new, _ in sequences]
    tables = [torch.as_tensor(table, dtype=torch.long) for _, _, table in sequences]
    places = [table[position // size] * size + position % size for table, position in zip(tables, positions, strict=True)]
    return torch.cat(positions), torch.cat(places)


def last_token_plan(
    batch: ForwardBatch, plan: BatchPlan, cache: PagedKVCache, dtype: torch.dtype, window: int | None = None
) -> BatchPlan:
    """The plan in which only each sequence's last new token asks: all that the last layer has to answer."""
    single = list(enumerate(_seen(batch, cache.block_tokens, window, last_only=True)))
    decode = _decode_work(single, cache, dtype)
    rows = plan.last_rows
    return BatchPlan(plan.positions[rows], plan.slots[rows], rows, (), decode)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The blocks that one sequence's last `new` of `total` tokens can see, counted from the first of these blocks; a token sees
    `window` tokens back (None: all), and none before `first`."""

    new: int
    total: int
    table: Sequence[int]
    window: int | None
    first: int


def _hidden(new: int, seen: Seen) -> Tensor | None:
    """[new, total] of bool, None when plain causal attention is right."""
    queries = torch.arange(seen.total - new, seen.total)[:, None]
    keys = torch.arange(seen.total)
    earliest = torch.full_like(queries, seen.first)
    if seen.window is not None:
        earliest = torch.maximum(earliest, queries - seen.window + 1)
    if new == seen.total and int(earliest.max()) == 0:
        return None
    return (keys > queries) | (keys < earliest)


def _seen(batch: ForwardBatch, size: int, window: int | None, *, last_only: bool = False) -> list[_Seen]:
    """What each sequence's new tokens see. Blocks that a window has left behind are not even read."""
    result = []
    for context, query, table in zip(batch.context_lens, batch.query_lens, batch.block_tables, strict=True):
        total, new = context + query, 1 if last_only else query
        first = 0
        if window is not None:
            first = max(0, total - new - window + 1, context if batch.replay else 0)
        skipped = first // size
        visible_from = context - skipped * size if batch.replay and window is not None else 0
        result.append(_Seen(new, total - skipped * size, table[skipped:], window, max(0, visible_from)))
    return result


def _check_batch(batch: ForwardBatch, cache: PagedKVCache) -> None:
    counts = (len(batch.query_lens), len(batch.context_lens), len(batch.block_tables))
    if len(set(counts)) != 1 or not counts[0]:
        raise ValueError(f"query_lens, context_lens and block_tables have {counts} entries; they need one a sequence")
    if min(batch.query_lens) < 1 or min(batch.context_lens) < 0:
        raise ValueError(f"query_lens {list(batch.query_lens)} must be >= 1, context_lens {list(batch.context_lens)} >= 0")
    if sum(batch.query_lens) != batch.token_ids.numel():
        raise ValueError(f"token_ids holds {batch.token_ids.numel()} tokens; query_lens sum to {sum(batch.query_lens)}")
    for new, context, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
        if len(table) * cache.block_tokens < context + new:
            raise ValueError(f"a block table of {len(table)} blocks is too short for {context + new} tokens")
        if min(table) < 0 or max(table) >= cache.num_blocks:
            raise ValueError(f"block ids {min(table)}..{max(table)} are outside of the cache's {cache.num_blocks} blocks")


def _block_run(table: Sequence[int], tokens: int, block_tokens: int, device: torch.device) -> BlockRun:
    used = list(table[: -(-tokens // block_tokens)])
    if used == list(range(used[0], used[0] + len(used))):
        return BlockRun(tokens, used[0], None)
    return BlockRun(tokens, None, torch.as_tensor(used, dtype=torch.long, device=device))


def _minus_infinity(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _decode_work(
    single: Sequence[tuple[int, _Seen]], cache: PagedKVCache, dtype: torch.dtype, padded_blocks: int | None = None
) -> DecodeWork:
    """`single`: row in the batch and context of each sequence with one new token."""
    device, size = cache.layers[0].device, cache.block_tokens
    contexts = [seen for _, seen in single]
    longest = max(seen.total for seen in contexts) if padded_blocks is None else padded_blocks * size
    used = [list(seen.table[: -(-seen.total // size)]) for seen in contexts]
    tables = torch.tensor([table + [0] * (-(-longest // size) - len(table)) for table in used])
    first = torch.tensor([max(seen.first, seen.total - (seen.window or seen.total)) for seen in contexts])
    lengths = torch.tensor([seen.total for seen in contexts])
    keys = torch.arange(longest)
    hidden = (keys >= lengths[:, None]) | (keys < first[:, None])
    alone = len(contexts) == 1 and padded_blocks is None
    masked = padded_blocks is not None or bool(hidden.any())
    return DecodeWork(
        rows=torch.tensor([row for row, _ in single], device=device),
        tables=tables.to(device),
        first=first.to(device),
        lengths=lengths.to(device),
        run=_block_run(contexts[0].table, contexts[0].total, size, device) if alone else None,
        max_tokens=longest,
        mask=_minus_infinity(hidden, dtype)[:, None, None].to(device) if masked else None,
    )


def write_kv(layer: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Put the KV of new tokens, [tokens, kv_heads, head_dim] each, at `slots` of a layer's cache."""
    flat = layer.flatten(0, 1)
    flat[slots] = torch.stack((keys, values), dim=1).to(layer.dtype)


@dataclass(frozen=True, slots=True)
class Softmax:
    """How logits become weights: times `scale` (None: one over the root of the head's size), and squeezed by tanh into
    `cap` where a model was trained so. `rounded`: native kernels may multiply a chunk's queries, keys, weights and values in 16
    bits, for models whose weights are rounded further."""

    scale: float | None = None
    cap: float | None = None
    rounded: bool = False

    def scale_of(self, queries: Tensor) -> float:
        return queries.shape[-1] ** -0.5 if self.scale is None else self.scale


PLAIN_SOFTMAX = Softmax()


def attend(queries: Tensor, layer: Tensor, plan: BatchPlan, softmax: Softmax = PLAIN_SOFTMAX) -> Tensor:
    """Attention of `queries` [tokens, heads, head_dim] over what the plan lets each token see; same shape out."""
    if plan.decode is not None and plan.decode_only:
        return _attend_decode(queries, layer, plan.decode, softmax)
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    kernels = _kernels(queries, layer)
    for chunk in plan.chunks:
        rows = slice(chunk.start, chunk.stop)
        if kernels is None:
            out[rows] = _attend_chunk(queries[rows], layer, chunk, softmax)
        else:
            rules = (softmax.scale_of(queries), softmax.cap)
            kernels.attend_chunk(queries[rows], layer, chunk.seen, rules, out[rows], rounded=softmax.rounded)
    if plan.decode is not None:
        out[plan.decode.rows] = _attend_decode(queries[plan.decode.rows], layer, plan.decode, softmax)
    return out


def _attend_chunk(queries: Tensor, layer: Tensor, chunk: ChunkWork, softmax: Softmax) -> Tensor:
    kv = chunk.run.read(layer).to(queries.dtype).permute(1, 2, 0, 3)
    if softmax.cap is not None:
        return _attend_capped(queries.transpose(0, 1), kv[0], kv[1], chunk.mask, softmax).transpose(0, 1)
    out = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        kv[0][None],
        kv[1][None],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=softmax.scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _attend_capped(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softmax: Softmax) -> Tensor:
    """[heads, tokens, head_dim] of one sequence, with capped logits, which fused kernels do not have."""
    assert softmax.cap is not None
    grouped = queries.reshape(len(keys), -1, *queries.shape[1:])
    logits = torch.tanh(grouped @ keys.mT[:, None] * (softmax.scale_of(queries) / softmax.cap)) * softmax.cap
    if mask is None:
        mask = torch.full(logits.shape[-2:], float("-inf"), dtype=logits.dtype, device=logits.device).triu_(1)
    out = (logits + mask).softmax(dim=-1) @ values[:, None]
    return out.flatten(0, 1)


def gather_contexts(layer: Tensor, work: DecodeWork) -> Tensor:
    """[sequences, tokens, *token_shape]: each decoding sequence's context, padded to the longest; a view where possible."""
    if work.run is not None:
        return work.run.read(layer)[None]
    blocks = layer.index_select(0, work.tables.flatten())
    return blocks.view(len(work.rows), -1, *layer.shape[2:])[:, : work.max_tokens]


def _attend_decode(queries: Tensor, layer: Tensor, work: DecodeWork, softmax: Softmax) -> Tensor:
    sequences, heads, head_dim = queries.shape
    scale = softmax.scale_of(queries)
    kernels = _kernels(queries, layer)
    if kernels is not None:
        return kernels.attend_decode(queries, layer, (work.tables, work.first, work.lengths), scale, softmax.cap)
    kv_heads = layer.shape[3]
    kv = gather_contexts(layer, work).to(queries.dtype).permute(2, 0, 3, 1, 4)
    grouped = queries.reshape(sequences, kv_heads, heads // kv_heads, head_dim)
    if softmax.cap is not None:
        logits = torch.tanh(grouped @ kv[0].mT * (scale / softmax.cap)) * softmax.cap
        out = (logits if work.mask is None else logits + work.mask).softmax(dim=-1) @ kv[1]
    else:
        out = F.scaled_dot_product_attention(grouped, kv[0], kv[1], attn_mask=work.mask, scale=scale)
    return out.reshape(sequences, heads, head_dim)


def _kernels(queries: Tensor, layer: Tensor) -> Kernels | None:
    """The native kernels, where they take queries [sequences, heads, head_dim] that may be a part of longer rows."""
    heads_together = queries.stride()[1:] == (queries.shape[2], 1)
    few_enough = queries.shape[1] <= native_kernels.MAX_SHARE * layer.shape[3]
    return native_kernels.kernels_for(queries) if heads_together and few_enough and native_kernels.stores(layer) else None
