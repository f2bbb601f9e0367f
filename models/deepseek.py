"""DeepSeek-V2 and -V3 decoders over a paged cache of latents.

Pre-norm blocks of multi-head latent attention (`models.latent_attention`) and a feed-forward that is dense in the first layers
and a mixture of experts (`models.mixture`) in the others. A token's cached state is its normed latent and one rotary key a
layer, whatever the number of heads. The last layer writes the state of every new token, but computes the rest for each
sequence's last one alone unless all logits are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.base import CausalLM, ForwardBatch, KVLayout, PagedKVCache
from models.deepseek_config import DeepseekConfig
from models.latent_attention import Expansion, Form, LatentShape, attend_latent, split_expansion, write_entries
from models.linear import Linear, Projections
from models.mixture import Gated, MixtureWeights, mixture
from models.ops import rms_norm
from models.paged_attention import last_token_plan, plan_batch
from models.rotary import rotary_tables, rotate
from models.weights import EMBED, FINAL_NORM, HEAD


@dataclass(frozen=True, slots=True)
class _Layer:
    """One block's weights. `query_b` and its norm are None where queries are projected directly, the latents' norm where
    a model was converted to latent attention."""

    attention_norm: Tensor
    query_kv_a: Linear
    query_a_norm: Tensor | None
    query_b: Linear | None
    kv_a_norm: Tensor | None
    expansion: Expansion
    output: Linear
    feed_forward_norm: Tensor
    feed_forward: Gated | MixtureWeights


class Deepseek(CausalLM):
    """A decoder of the DeepSeek-V2/V3 family. `form` fixes how prefill chunks attend; both forms give the same result."""

    def __init__(
        self,
        config: DeepseekConfig,
        weights: Mapping[str, Tensor],
        kv_dtype: torch.dtype = torch.float32,
        form: Form = Form.CHEAPER,
        weight_format: str = "full",
    ) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_context = config.max_context
        entry = (config.kv_rank + config.rope_dim,)
        self.layout = KVLayout(config.layout_name, config.layout_version, config.num_layers, entry, kv_dtype)
        self._form = form
        self._shape = _latent_shape(config)
        self._embed = weights[EMBED]
        self._norm = weights[FINAL_NORM]
        project = Projections(weights, weight_format)
        self._head = project(EMBED if config.tied_embeddings else HEAD)
        self._layers = [_layer(config, weights, project, self._shape, index) for index in range(config.num_layers)]
        self._cos, self._sin = rotary_tables(config.rope, self._embed.device, self._embed.dtype)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: PagedKVCache, *, on_layer: Callable[[int], None] | None = None) -> Tensor:
        plan = plan_batch(batch, cache, self._embed.dtype)
        self.check_context(batch)
        cos, sin = self._cos[plan.positions], self._sin[plan.positions]
        hidden = F.embedding(batch.token_ids.to(self._embed.device), self._embed)
        for index, (layer, entries) in enumerate(zip(self._layers, cache.layers, strict=True)):
            queries, latents, rope_keys = self._project(layer, hidden, cos, sin)
            write_entries(entries, plan.slots, latents, rope_keys)
            if on_layer is not None:
                on_layer(index)
            if index == len(self._layers) - 1 and not batch.all_logits and len(plan.last_rows) < len(hidden):
                hidden, queries = hidden[plan.last_rows], queries[plan.last_rows]
                plan = last_token_plan(batch, plan, cache, self._embed.dtype)
            attended = attend_latent(queries, entries, plan, self._shape, layer.expansion, self._form)
            hidden = self._finish_layer(layer, hidden, attended)
        return self._head(self._normed(hidden, self._norm)).float()

    def _project(self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        first = layer.query_kv_a(self._normed(hidden, layer.attention_norm))
        query_size = first.shape[-1] - config.kv_rank - config.rope_dim
        queries, latents, rope_keys = first.tensor_split((query_size, query_size + config.kv_rank), dim=-1)
        if layer.query_a_norm is not None and layer.query_b is not None:
            queries = layer.query_b(self._normed(queries.contiguous(), layer.query_a_norm))
        queries = queries.view(len(hidden), config.num_heads, config.query_dim)
        nope, rope = queries.tensor_split((config.nope_dim,), dim=-1)
        queries = torch.cat((nope, rotate(rope, cos, sin)), dim=-1)
        if layer.kv_a_norm is not None:
            latents = self._normed(latents.contiguous(), layer.kv_a_norm)
        return queries, latents, rotate(rope_keys[:, None], cos, sin)[:, 0]

    def _finish_layer(self, layer: _Layer, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + layer.output(attended.flatten(1))
        normed = self._normed(hidden, layer.feed_forward_norm)
        if isinstance(layer.feed_forward, Gated):
            return hidden + layer.feed_forward(normed)
        assert self.config.moe is not None
        return hidden + mixture(normed, layer.feed_forward, self.config.moe)

    def _normed(self, values: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(values, weight, self.config.norm_eps)


def _latent_shape(config: DeepseekConfig) -> LatentShape:
    return LatentShape(
        heads=config.num_heads,
        nope_dim=config.nope_dim,
        rope_dim=config.rope_dim,
        value_dim=config.value_dim,
        rank=config.kv_rank,
        scale=config.softmax_scale,
    )


def _layer(
    config: DeepseekConfig, weights: Mapping[str, Tensor], project: Projections, shape: LatentShape, index: int
) -> _Layer:
    prefix = f"layers.{index}."
    return _Layer(
        attention_norm=weights[prefix + "attention_norm.weight"],
        query_kv_a=project(prefix + "query_kv_a.weight"),
        query_a_norm=weights.get(prefix + "query_a_norm.weight"),
        query_b=project(prefix + "query_b.weight") if prefix + "query_b.weight" in weights else None,
        kv_a_norm=weights.get(prefix + "kv_a_norm.weight"),
        expansion=split_expansion(weights[prefix + "kv_b.weight"], shape),
        output=project(prefix + "output.weight"),
        feed_forward_norm=weights[prefix + "feed_forward_norm.weight"],
        feed_forward=_feed_forward(config, weights, project, prefix, index),
    )


def _feed_forward(
    config: DeepseekConfig, weights: Mapping[str, Tensor], project: Projections, prefix: str, index: int
) -> Gated | MixtureWeights:
    def pair(name: str) -> Gated:
        return Gated(project(f"{prefix}{name}gate_up.weight"), project(f"{prefix}{name}down.weight"))

    if config.is_dense(index) or config.moe is None:
        return pair("")
    return MixtureWeights(
        router=weights[prefix + "router.weight"],
        router_bias=weights.get(prefix + "router.bias"),
        shared=pair("shared."),
        experts=tuple(
            Gated(project(f"{prefix}experts.gate_up.weight", expert), project(f"{prefix}experts.down.weight", expert))
            for expert in range(config.moe.routed_experts)
        ),
    )
