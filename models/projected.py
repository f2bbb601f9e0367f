"""A decoder whose global KV is projected from the output of an encoder, over a paged KV cache.

Two causal stacks, one after the other. The encoder's layers see a sliding window. What leaves the encoder is projected once
into keys and values, one entry a token, and all layers of the decoder read that one entry beyond windows of their own. So
global state is one layer's, whatever the depth, and is complete before the decoder begins; the rest is window state, which
bounded replay rebuilds (`models.window_state`).

From the DeepSeek-V4.1 report: the two stacks; that the decoder's global state comes from the encoder's output, from one source
layer that all the others reuse, uncompressed (m = 1); windows in every layer; and that only window state is replayed.

Ours, where the report is silent or the thing is made smaller:

- The encoder's output is normed, by a norm of the projection's own, and goes on into the decoder as it is.
- Global keys turn by their own token's rotary position, as window keys do. With one entry a token nothing else is to choose.
- A decoder layer asks its window and the global state with queries of their own. Each is attention of its own; one
  projection over both results, side by side, joins them.
- Keys and values have grouped heads, and every entry is read: there is neither a latent nor an index that picks some.
- The encoder has no global state. The report's has, in groups that keep one entry for two tokens (m = 2), and how these get
  their positions is not published.
- Every token goes through both stacks, so that a prefix can be reused wherever a block ends, window state included. A prefill
  that runs the encoder alone and replays the decoder's windows would compute half as much, and be an approximation.

So no published weights can be loaded, and none of the report's figures of quality or speed are claimed for this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.base import CausalLM, ForwardBatch, KVLayout, PagedKVCache
from models.linear import Linear, Projections
from models.mixture import Gated
from models.ops import rms_norm
from models.paged_attention import BatchPlan, Softmax, attend, last_token_plan, plan_batch, write_kv
from models.projected_config import SOURCE_KV, SOURCE_NORM, ProjectedConfig
from models.rotary import rotary_tables, rotate
from models.weights import EMBED, FINAL_NORM, HEAD


@dataclass(frozen=True, slots=True)
class _Layer:
    """One block's weights. `global_query` is None in the encoder."""

    attention_norm: Tensor
    qkv: Linear
    global_query: Linear | None
    output: Linear
    feed_forward_norm: Tensor
    feed_forward: Gated


@dataclass(frozen=True, slots=True)
class _Plans:
    """How new tokens read their windows and the global state, and the angles they turn by."""

    window: BatchPlan
    whole: BatchPlan
    angles: tuple[Tensor, Tensor]


class Projected(CausalLM):
    """An encoder and a decoder that reads it. `weights`: the tensors of `projected_shapes`, on one device, of one dtype."""

    def __init__(
        self,
        config: ProjectedConfig,
        weights: Mapping[str, Tensor],
        kv_dtype: torch.dtype = torch.float32,
        weight_format: str = "full",
    ) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_context = config.max_context
        entry = (2, config.num_kv_heads, config.head_dim)
        name, version, windows = config.layout_name, config.layout_version, config.windows
        self.layout = KVLayout(name, version, len(windows), entry, kv_dtype, windows)
        project = Projections(weights, weight_format)
        self._embed = weights[EMBED]
        self._norm = weights[FINAL_NORM]
        self._head = project(EMBED if config.tied_embeddings else HEAD)
        self._source_norm = weights[SOURCE_NORM]
        self._source_kv = project(SOURCE_KV)
        layers = [_layer(config, weights, project, index) for index in range(config.num_layers)]
        self._encoder, self._decoder = layers[: config.encoder_layers], layers[config.encoder_layers :]
        self._cos, self._sin = rotary_tables(config.rope, self._embed.device, self._embed.dtype)
        self._softmax = Softmax(rounded=weight_format != "full")

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: PagedKVCache, *, on_layer: Callable[[int], None] | None = None) -> Tensor:
        self.check_context(batch)
        written = on_layer if on_layer is not None else lambda index: None
        plans = self._plan(batch, cache)
        hidden = F.embedding(batch.token_ids.to(self._embed.device), self._embed)
        for index, layer in enumerate(self._encoder):
            normed = self._normed(hidden, layer.attention_norm)
            queries = self._write_window(layer, normed, plans, cache.layers[index])
            written(index)
            seen = attend(queries, cache.layers[index], plans.window, self._softmax).flatten(1)
            hidden = self._finish_layer(layer, hidden, seen)
        source = self.config.encoder_layers
        if not batch.replay:
            self._write_source(hidden, plans, cache.layers[source])
        written(source)
        return self._decode(batch, hidden, plans, cache, written)

    def _decode(
        self, batch: ForwardBatch, hidden: Tensor, plans: _Plans, cache: PagedKVCache, written: Callable[[int], None]
    ) -> Tensor:
        """Logits, from what leaves the encoder and the global state that was made of it."""
        source = cache.layers[self.config.encoder_layers]
        for index, layer in enumerate(self._decoder, start=self.config.encoder_layers + 1):
            assert layer.global_query is not None
            normed = self._normed(hidden, layer.attention_norm)
            queries = self._write_window(layer, normed, plans, cache.layers[index])
            written(index)
            if layer is self._decoder[-1]:
                if not batch.logits:
                    return hidden.new_empty(0, self.vocab_size)
                if not batch.all_logits and len(plans.window.last_rows) < len(hidden):
                    rows = plans.window.last_rows
                    hidden, normed, queries = hidden[rows], normed[rows], queries[rows]
                    plans = self._last_tokens(batch, plans, cache)
            asked = rotate(self._heads(layer.global_query(normed)), *plans.angles)
            near = attend(queries, cache.layers[index], plans.window, self._softmax)
            far = attend(asked, source, plans.whole, self._softmax)
            hidden = self._finish_layer(layer, hidden, torch.cat((near.flatten(1), far.flatten(1)), dim=-1))
        return self._head(self._normed(hidden, self._norm)).float()

    def _plan(self, batch: ForwardBatch, cache: PagedKVCache) -> _Plans:
        dtype = self._embed.dtype
        window, whole = plan_batch(batch, cache, dtype, self.config.window), plan_batch(batch, cache, dtype)
        return _Plans(window, whole, (self._cos[window.positions], self._sin[window.positions]))

    def _last_tokens(self, batch: ForwardBatch, plans: _Plans, cache: PagedKVCache) -> _Plans:
        dtype, rows = self._embed.dtype, plans.window.last_rows
        window = last_token_plan(batch, plans.window, cache, dtype, self.config.window)
        whole = last_token_plan(batch, plans.whole, cache, dtype)
        cos, sin = plans.angles
        return _Plans(window, whole, (cos[rows], sin[rows]))

    def _write_window(self, layer: _Layer, normed: Tensor, plans: _Plans, kv: Tensor) -> Tensor:
        """The queries to a layer's window, whose keys and values are written to its cache."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        queries_keys, values = self._heads(layer.qkv(normed)).tensor_split((heads + kv_heads,), dim=1)
        queries, keys = rotate(queries_keys, *plans.angles).tensor_split((heads,), dim=1)
        write_kv(kv, plans.window.slots, keys, values)
        return queries

    def _write_source(self, encoded: Tensor, plans: _Plans, kv: Tensor) -> None:
        keys, values = self._heads(self._source_kv(self._normed(encoded, self._source_norm))).chunk(2, dim=1)
        write_kv(kv, plans.whole.slots, rotate(keys, *plans.angles), values)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(len(projected), -1, self.config.head_dim)

    def _finish_layer(self, layer: _Layer, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + layer.output(attended)
        return hidden + layer.feed_forward(self._normed(hidden, layer.feed_forward_norm))

    def _normed(self, values: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(values, weight, self.config.norm_eps)


def _layer(config: ProjectedConfig, weights: Mapping[str, Tensor], project: Projections, index: int) -> _Layer:
    prefix = f"layers.{index}."
    return _Layer(
        attention_norm=weights[prefix + "attention_norm.weight"],
        qkv=project(prefix + "qkv.weight"),
        global_query=project(prefix + "global_query.weight") if index >= config.encoder_layers else None,
        output=project(prefix + "output.weight"),
        feed_forward_norm=weights[prefix + "feed_forward_norm.weight"],
        feed_forward=Gated(project(prefix + "gate_up.weight"), project(prefix + "down.weight")),
    )
