"""Grouped-query attention over a paged KV cache.

A `BatchPlan` is made once a forward pass and serves every layer. It lays the batch out in two kinds of work:

- sequences with one new token (decode) are computed together: their blocks are gathered into one padded
  [sequences, context] tensor, and the query heads that share a KV head become rows of one small product;
- sequences with more new tokens (a prefill chunk) are computed one after another against their own context.

A sequence whose blocks lie side by side in the cache is read through a view; only scattered blocks are copied.
Layout of one layer's cache: [blocks, block_tokens, 2, kv_heads, head_dim], keys first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.base import ForwardBatch, PagedKVCache


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


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """One sequence with several new tokens: rows `start..stop` of the batch, the last of `run.tokens` tokens of context.

    `mask` is None when the chunk starts its sequence, and plain causal attention is right.
    """

    start: int
    stop: int
    run: BlockRun
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """All sequences with one new token. `run` replaces `tables` when there is one sequence; `mask` [sequences, 1, 1, context]
    hides the padding and is None when there is none."""

    rows: Tensor
    tables: Tensor
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


def plan_batch(batch: ForwardBatch, cache: PagedKVCache, dtype: torch.dtype) -> BatchPlan:
    """Lay out `batch`. Raises `ValueError` when its lengths disagree or a block table is too short or out of range."""
    _check_batch(batch, cache)
    device, size = cache.layers[0].device, cache.block_tokens
    totals = [context + new for context, new in zip(batch.context_lens, batch.query_lens, strict=True)]
    positions, slots, chunks, single = [], [], [], []
    row = 0
    for sequence, (context, total) in enumerate(zip(batch.context_lens, totals, strict=True)):
        position = torch.arange(context, total)
        table = torch.as_tensor(batch.block_tables[sequence], dtype=torch.long)
        positions.append(position)
        slots.append(table[position // size] * size + position % size)
        if total - context == 1:
            single.append((row, sequence))
        else:
            run = _block_run(batch.block_tables[sequence], total, size, device)
            chunks.append(ChunkWork(row, row + total - context, run, _chunk_mask(context, total, device, dtype)))
        row += total - context
    decode = _decode_work(single, batch, totals, cache, dtype) if single else None
    last_rows = torch.as_tensor(batch.query_lens).cumsum(0) - 1
    return BatchPlan(torch.cat(positions).to(device), torch.cat(slots).to(device), last_rows.to(device), tuple(chunks), decode)


def last_token_plan(batch: ForwardBatch, plan: BatchPlan, cache: PagedKVCache, dtype: torch.dtype) -> BatchPlan:
    """The plan in which only each sequence's last new token asks: all that the last layer has to answer."""
    totals = [context + new for context, new in zip(batch.context_lens, batch.query_lens, strict=True)]
    single = [(sequence, sequence) for sequence in range(len(totals))]
    decode = _decode_work(single, batch, totals, cache, dtype)
    rows = plan.last_rows
    return BatchPlan(plan.positions[rows], plan.slots[rows], rows, (), decode)


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


def _chunk_mask(context: int, total: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    if context == 0:
        return None
    hidden = torch.ones(total - context, total, dtype=torch.bool, device=device).triu_(context + 1)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def _decode_work(
    single: Sequence[tuple[int, int]], batch: ForwardBatch, totals: Sequence[int], cache: PagedKVCache, dtype: torch.dtype
) -> DecodeWork:
    device, size = cache.layers[0].device, cache.block_tokens
    lengths = [totals[sequence] for _, sequence in single]
    width = -(-max(lengths) // size)
    tables = torch.zeros(len(single), width, dtype=torch.long)
    for i, (_, sequence) in enumerate(single):
        used = batch.block_tables[sequence][: -(-totals[sequence] // size)]
        tables[i, : len(used)] = torch.as_tensor(used)
    mask = None
    if min(lengths) < max(lengths):
        hidden = torch.arange(max(lengths)) >= torch.as_tensor(lengths)[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None, None].to(device)
    run = _block_run(batch.block_tables[single[0][1]], totals[single[0][1]], size, device) if len(single) == 1 else None
    rows = torch.as_tensor([row for row, _ in single], device=device)
    return DecodeWork(rows, tables.flatten().to(device), run, max(lengths), mask)


def write_kv(layer: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Put the KV of new tokens, [tokens, kv_heads, head_dim] each, at `slots` of a layer's cache."""
    flat = layer.flatten(0, 1)
    flat[slots] = torch.stack((keys, values), dim=1).to(layer.dtype)


def attend(queries: Tensor, layer: Tensor, plan: BatchPlan) -> Tensor:
    """Attention of `queries` [tokens, heads, head_dim] over each sequence's cached context; same shape out."""
    if plan.decode is not None and plan.decode_only:
        return _attend_decode(queries, layer, plan.decode)
    out = torch.empty_like(queries)
    for chunk in plan.chunks:
        out[chunk.start : chunk.stop] = _attend_chunk(queries[chunk.start : chunk.stop], layer, chunk)
    if plan.decode is not None:
        out[plan.decode.rows] = _attend_decode(queries[plan.decode.rows], layer, plan.decode)
    return out


def _attend_chunk(queries: Tensor, layer: Tensor, chunk: ChunkWork) -> Tensor:
    kv = chunk.run.read(layer).to(queries.dtype).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        kv[0][None],
        kv[1][None],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def gather_contexts(layer: Tensor, work: DecodeWork) -> Tensor:
    """[sequences, tokens, *token_shape]: each decoding sequence's context, padded to the longest; a view where possible."""
    if work.run is not None:
        return work.run.read(layer)[None]
    blocks = layer.index_select(0, work.tables)
    return blocks.view(len(work.rows), -1, *layer.shape[2:])[:, : work.max_tokens]


def _attend_decode(queries: Tensor, layer: Tensor, work: DecodeWork) -> Tensor:
    sequences, heads, head_dim = queries.shape
    kv_heads = layer.shape[3]
    kv = gather_contexts(layer, work).to(queries.dtype).permute(2, 0, 3, 1, 4)
    grouped = queries.reshape(sequences, kv_heads, heads // kv_heads, head_dim)
    out = F.scaled_dot_product_attention(grouped, kv[0], kv[1], attn_mask=work.mask)
    return out.reshape(sequences, heads, head_dim)
