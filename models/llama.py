"""The Llama family of decoders over a paged KV cache: Llama, Mistral (sliding window), Qwen2 (biased q, k, v), Qwen3
(normed q, k), and Gemma 2 and 3 text models (window and global layers in turn, norms around each part).

Pre-norm blocks of grouped-query attention and a gated feed-forward, rotary positions, optionally tied embeddings. The weights
arrive fused (`models.weights`) and may be memory-mapped; they are only read. Attention and cache layout are those of
`models.paged_attention`. The last layer writes the KV of every new token, but computes the rest for each sequence's last one
alone, since nothing else is asked of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from models import native_kernels
from models.base import CausalLM, ForwardBatch, KVLayout, PagedKVCache
from models.config import ModelConfig, Rope
from models.linear import Linear, Projections
from models.ops import gated_silu, rms_norm
from models.paged_attention import BatchPlan, Softmax, attend, last_token_plan, plan_batch, write_kv
from models.rotary import rotary_tables, rotate
from models.weights import EMBED, FINAL_NORM, HEAD

Plans: TypeAlias = Mapping[int | None, BatchPlan]  # by the width of the window, None where there is none


@dataclass(frozen=True, slots=True)
class _Layer:
    """One block's weights; optional ones are None where the architecture lacks them."""

    attention_norm: Tensor
    attended_norm: Tensor | None
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    feed_forward_norm: Tensor
    fed_norm: Tensor | None
    gate_up: Linear
    down: Linear


class Llama(CausalLM):
    """A decoder of the Llama family. `weights` holds the fused tensors, all on one device and of one dtype.

    With some of the `layers` alone it is one stage of a pipeline, which takes and gives hidden states (`forward_stage`); then
    it asks for the weights of these layers only, and computes over a cache that holds these.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        kv_dtype: torch.dtype = torch.float32,
        weight_format: str = "full",
        layers: range | None = None,
    ) -> None:
        self.config = config
        self.layers = range(config.num_layers) if layers is None else layers
        self.vocab_size = config.vocab_size
        self.max_context = config.max_context
        token_shape = (2, config.num_kv_heads, config.head_dim)
        self._windows = [config.window(i) for i in range(config.num_layers)]
        name, version = config.layout_name, config.layout_version
        self.layout = KVLayout(name, version, config.num_layers, token_shape, kv_dtype, tuple(self._windows))
        project = Projections(weights, weight_format)
        self._layers = [_layer(weights, project, i) for i in self.layers]
        self._like = self._layers[0].attention_norm  # device and dtype of everything that is computed
        self._embed = weights.get(EMBED)
        self._norm = weights.get(FINAL_NORM)
        self._head = project(EMBED if config.tied_embeddings else HEAD) if self._last else None
        ropes = {window: self._rope(window) for window in set(self._windows)}
        self._tables = {window: rotary_tables(rope, self._like.device, self._like.dtype) for window, rope in ropes.items()}
        gemma = config.gemma
        scale, cap = (None, None) if gemma is None else (gemma.softmax_scale, gemma.attention_cap)
        self._softmax = Softmax(scale, cap, rounded=weight_format != "full")

    @property
    def _last(self) -> bool:
        return self.layers.stop == self.config.num_layers

    def _rope(self, window: int | None) -> Rope:
        return self.config.rope if window is None or self.config.gemma is None else self.config.gemma.window_rope

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: PagedKVCache, *, on_layer: Callable[[int], None] | None = None) -> Tensor:
        return self.compute(batch, self.plan(batch, cache), cache, on_layer)

    @torch.inference_mode()
    def forward_stage(
        self,
        batch: ForwardBatch,
        hidden: Tensor | None,
        cache: PagedKVCache,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """The hidden states after these layers from those before them, None before the first; logits after the last."""
        arriving = self._embedded(batch.token_ids) if hidden is None else hidden.to(self._like.device)
        return self._through(batch, self.plan(batch, cache), arriving, cache, on_layer)

    def plan(self, batch: ForwardBatch, cache: PagedKVCache, padded_blocks: int | None = None) -> Plans:
        """How to compute a batch, for each width of window. See `plan_batch`."""
        self.check_context(batch)
        return {window: plan_batch(batch, cache, self._like.dtype, window, padded_blocks) for window in self._tables}

    def compute(
        self, batch: ForwardBatch, plans: Plans, cache: PagedKVCache, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """What `forward` returns. Touches the host for nothing that depends on tokens or places, if all of a batch decodes."""
        return self._through(batch, plans, self._embedded(batch.token_ids), cache, on_layer)

    def _through(
        self,
        batch: ForwardBatch,
        plans: Plans,
        hidden: Tensor,
        cache: PagedKVCache,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        angles = {
            window: (cos[plans[window].positions], sin[plans[window].positions]) for window, (cos, sin) in self._tables.items()
        }
        for index, layer, kv in zip(self.layers, self._layers, cache.layers, strict=True):
            window = self._windows[index]
            plan = plans[window]
            store = not batch.replay or window is not None
            queries = self._project(layer, hidden, angles[window], kv, plan.slots if store else None)
            if on_layer is not None:
                on_layer(index)
            if index == self.config.num_layers - 1:
                if not batch.logits:
                    return hidden.new_empty(0, self.vocab_size)
                if not batch.all_logits and len(plan.last_rows) < len(hidden):
                    hidden, queries = hidden[plan.last_rows], queries[plan.last_rows]
                    plan = last_token_plan(batch, plan, cache, self._like.dtype, window)
            hidden = self._finish_layer(layer, hidden, queries, kv, plan)
        return self._logits(hidden) if self._last else hidden

    def _embedded(self, token_ids: Tensor) -> Tensor:
        assert self._embed is not None
        hidden = F.embedding(token_ids.to(self._embed.device), self._embed)
        return hidden if self.config.gemma is None else hidden * self.config.gemma.embedding_scale

    def _logits(self, hidden: Tensor) -> Tensor:
        assert self._head is not None
        assert self._norm is not None
        logits = self._head(self._normed(hidden, self._norm)).float()
        cap = None if self.config.gemma is None else self.config.gemma.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _project(
        self, layer: _Layer, hidden: Tensor, angles: tuple[Tensor, Tensor], kv: Tensor, slots: Tensor | None
    ) -> Tensor:
        """The queries [tokens, heads, head_dim]. Keys and values are written to `slots` of a layer's cache unless None."""
        heads, dim = self.config.num_heads, self.config.head_dim
        qkv = layer.qkv(self._normed(hidden, layer.attention_norm))
        if slots is not None and layer.query_norm is None and native_kernels.stores(kv):
            kernels = native_kernels.usable(qkv)
            if kernels is not None:
                kernels.rotate_and_store(qkv, angles, kv, slots, heads)
                return qkv.view(len(hidden), -1, dim)[:, :heads]
        queries, keys, values = self._turned(layer, qkv.view(len(hidden), -1, dim), angles)
        if slots is not None:
            write_kv(kv, slots, keys, values)
        return queries

    def _turned(self, layer: _Layer, qkv: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normed where the architecture norms them, by their tokens' angles; values."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        queries_keys, values = qkv.tensor_split((heads + kv_heads,), dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = (part.contiguous() for part in queries_keys.tensor_split((heads,), dim=1))
            queries_keys = torch.cat((self._normed(queries, layer.query_norm), self._normed(keys, layer.key_norm)), dim=1)
        queries, keys = rotate(queries_keys, *angles).tensor_split((heads,), dim=1)
        return queries, keys, values

    def _finish_layer(self, layer: _Layer, hidden: Tensor, queries: Tensor, kv: Tensor, plan: BatchPlan) -> Tensor:
        attended = attend(queries, kv, plan, self._softmax).reshape(len(hidden), -1)
        attended = layer.output(attended)
        if layer.attended_norm is not None:
            attended = self._normed(attended, layer.attended_norm)
        hidden = hidden + attended
        fed = self._feed_forward(layer, self._normed(hidden, layer.feed_forward_norm))
        return hidden.add_(fed if layer.fed_norm is None else self._normed(fed, layer.fed_norm))

    def _feed_forward(self, layer: _Layer, hidden: Tensor) -> Tensor:
        gate_up = layer.gate_up(hidden)
        if self.config.gemma is None:
            return layer.down(gated_silu(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return layer.down(F.gelu(gate, approximate="tanh").mul_(up))

    def _normed(self, values: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(values, weight, self.config.norm_eps)


def _layer(weights: Mapping[str, Tensor], project: Projections, index: int) -> _Layer:
    prefix = f"layers.{index}."
    return _Layer(
        attention_norm=weights[prefix + "attention_norm.weight"],
        attended_norm=weights.get(prefix + "attended_norm.weight"),
        qkv=project(prefix + "qkv.weight"),
        query_norm=weights.get(prefix + "query_norm.weight"),
        key_norm=weights.get(prefix + "key_norm.weight"),
        output=project(prefix + "output.weight"),
        feed_forward_norm=weights[prefix + "feed_forward_norm.weight"],
        fed_norm=weights.get(prefix + "fed_norm.weight"),
        gate_up=project(prefix + "gate_up.weight"),
        down=project(prefix + "down.weight"),
    )
