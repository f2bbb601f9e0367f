"""The Llama family of decoders over a paged KV cache: Llama, Mistral without window, Qwen2 (biased q, k, v), Qwen3
(normed q, k).

Pre-norm blocks of grouped-query attention and a gated feed-forward, rotary positions, optionally tied embeddings. The weights
arrive fused (`models.weights`) and may be memory-mapped; they are only read. Attention and cache layout are those of
`models.paged_attention`. The last layer writes the KV of every new token, but computes the rest for each sequence's last one
alone, since nothing else is asked of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.base import CausalLM, ForwardBatch, KVLayout, PagedKVCache
from models.config import ModelConfig
from models.paged_attention import BatchPlan, attend, last_token_plan, plan_batch, write_kv
from models.rotary import rotary_tables, rotate
from models.weights import EMBED, FINAL_NORM, HEAD


@dataclass(frozen=True, slots=True)
class _Layer:
    """One block's weights; optional ones are None where the architecture lacks them."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    feed_forward_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Llama(CausalLM):
    """A decoder of the Llama family. `weights` holds the fused tensors, all on one device and of one dtype."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], kv_dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_context = config.max_context
        token_shape = (2, config.num_kv_heads, config.head_dim)
        self.layout = KVLayout(config.layout_name, config.layout_version, config.num_layers, token_shape, kv_dtype)
        self._embed = weights[EMBED]
        self._norm = weights[FINAL_NORM]
        self._head = self._embed if config.tied_embeddings else weights[HEAD]
        self._layers = [_layer(weights, i) for i in range(config.num_layers)]
        self._cos, self._sin = rotary_tables(config.rope, self._embed.device, self._embed.dtype)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: PagedKVCache, *, on_layer: Callable[[int], None] | None = None) -> Tensor:
        plan = plan_batch(batch, cache, self._embed.dtype)
        self.check_context(batch)
        cos, sin = self._cos[plan.positions], self._sin[plan.positions]
        hidden = F.embedding(batch.token_ids.to(self._embed.device), self._embed)
        for index, (layer, kv) in enumerate(zip(self._layers, cache.layers, strict=True)):
            queries, keys, values = self._project(layer, hidden, cos, sin)
            write_kv(kv, plan.slots, keys, values)
            if on_layer is not None:
                on_layer(index)
            if index == len(self._layers) - 1 and not batch.all_logits and len(plan.last_rows) < len(hidden):
                hidden, queries = hidden[plan.last_rows], queries[plan.last_rows]
                plan = last_token_plan(batch, plan, cache, self._embed.dtype)
            hidden = self._finish_layer(layer, hidden, queries, kv, plan)
        return F.linear(self._normed(hidden, self._norm), self._head).float()

    def _project(self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = F.linear(self._normed(hidden, layer.attention_norm), layer.qkv, layer.qkv_bias)
        queries_keys, values = qkv.view(len(hidden), -1, dim).tensor_split((heads + kv_heads,), dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = queries_keys.tensor_split((heads,), dim=1)
            normed = self._normed(queries, layer.query_norm), self._normed(keys, layer.key_norm)
            queries_keys = torch.cat(normed, dim=1)
        queries, keys = rotate(queries_keys, cos, sin).tensor_split((heads,), dim=1)
        return queries, keys, values

    def _finish_layer(self, layer: _Layer, hidden: Tensor, queries: Tensor, kv: Tensor, plan: BatchPlan) -> Tensor:
        attended = attend(queries, kv, plan).reshape(len(hidden), -1)
        hidden = hidden + F.linear(attended, layer.output, layer.output_bias)
        gate, up = F.linear(self._normed(hidden, layer.feed_forward_norm), layer.gate_up).chunk(2, dim=-1)
        return hidden.add_(F.linear(F.silu(gate, inplace=True).mul_(up), layer.down))

    def _normed(self, values: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(values, (values.shape[-1],), weight, self.config.norm_eps)


def _layer(weights: Mapping[str, Tensor], index: int) -> _Layer:
    prefix = f"layers.{index}."
    return _Layer(
        attention_norm=weights[prefix + "attention_norm.weight"],
        qkv=weights[prefix + "qkv.weight"],
        qkv_bias=weights.get(prefix + "qkv.bias"),
        query_norm=weights.get(prefix + "query_norm.weight"),
        key_norm=weights.get(prefix + "key_norm.weight"),
        output=weights[prefix + "output.weight"],
        output_bias=weights.get(prefix + "output.bias"),
        feed_forward_norm=weights[prefix + "feed_forward_norm.weight"],
        gate_up=weights[prefix + "gate_up.weight"],
        down=weights[prefix + "down.weight"],
    )
