"""Decode steps as CUDA graphs: a step of a small model is hundreds of short kernels, and launching them one by one costs more
than running them.

A graph replays the same kernels on the same addresses, so what changes from step to step (tokens, positions, slots, block
tables, masks) lies in buffers that are filled before each replay. Shapes must be the same too: a batch is padded to a power of
two by repeating its first sequence, which writes the same KV to the same slot again, and block tables to a power of two blocks
under a mask. One graph is recorded for each such pair, at its first use. Prefill and mixed batches run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

import torch
from torch import Tensor

from models.base import CausalLM, ForwardBatch, PagedKVCache
from models.llama import Llama, Plans
from models.paged_attention import BatchPlan

Step: TypeAlias = Callable[[], Tensor]
Record: TypeAlias = Callable[[Step], Step]

_WARM_UP_RUNS = 3  # so that libraries have chosen their kernels and workspaces before the recording


def record_cuda_graph(step: Step) -> Step:
    """A function that does again what `step` does, on the same addresses, and returns the same tensor with new contents."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP_RUNS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A step, and the buffers that it reads."""

    token_ids: Tensor
    plans: Plans
    run: Step


class GraphedDecode(CausalLM):
    """`model` over one cache. `record` turns a step into one that can be repeated when its buffers have new contents."""

    def __init__(self, model: Llama, cache: PagedKVCache, record: Record = record_cuda_graph) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.max_context = model.max_context
        self.layout = model.layout
        self._cache = cache
        self._record = record
        self._recorded: dict[tuple[int, int], _Recorded] = {}

    @property
    def recorded_shapes(self) -> tuple[tuple[int, int], ...]:
        """Sequences and blocks of the steps recorded so far."""
        return tuple(self._recorded)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: PagedKVCache, *, on_layer: Callable[[int], None] | None = None) -> Tensor:
        decodes = max(batch.query_lens) == 1 and not batch.replay
        if cache is not self._cache or on_layer is not None or not decodes:
            return self.model.forward(batch, cache, on_layer=on_layer)
        padded = padded_batch(batch)
        blocks = _power_of_two(max(-(-(context + 1) // cache.block_tokens) for context in padded.context_lens))
        plans = self.model.plan(padded, cache, blocks)
        key = (len(padded.query_lens), blocks)
        known = self._recorded.get(key)
        if known is None:
            known = self._recorded[key] = self._record_step(padded, plans)
        else:
            known.token_ids.copy_(padded.token_ids)
            for window, plan in plans.items():
                copy_plan(plan, known.plans[window])
        return known.run()[: len(batch.query_lens)].clone()

    def _record_step(self, batch: ForwardBatch, plans: Plans) -> _Recorded:
        token_ids = batch.token_ids.to(self._cache.layers[0].device, copy=True)
        buffered = replace(batch, token_ids=token_ids)
        return _Recorded(token_ids, plans, self._record(lambda: self.model.compute(buffered, plans, self._cache)))


def padded_batch(batch: ForwardBatch) -> ForwardBatch:
    """The batch with its first sequence repeated until their number is a power of two."""
    extra = _power_of_two(len(batch.query_lens)) - len(batch.query_lens)
    if not extra:
        return batch
    return replace(
        batch,
        token_ids=torch.cat((batch.token_ids, batch.token_ids[:1].expand(extra))),
        query_lens=[*batch.query_lens, *[1] * extra],
        context_lens=[*batch.context_lens, *[batch.context_lens[0]] * extra],
        block_tables=[*batch.block_tables, *[batch.block_tables[0]] * extra],
    )


def copy_plan(source: BatchPlan, target: BatchPlan) -> None:
    """Fill the tensors of a plan for decoding with those of another of the same shapes."""
    assert source.decode is not None
    assert target.decode is not None
    for old, new in ((target, source), (target.decode, source.decode)):
        for field in fields(old):
            kept, fresh = getattr(old, field.name), getattr(new, field.name)
            if isinstance(kept, Tensor):
                kept.copy_(fresh)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
