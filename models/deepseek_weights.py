"""The tensors of a DeepSeek decoder, from Hugging Face's names to ours, fused.

The first projections of queries and of the latent become one matrix; each layer's experts become two stacked tensors. Rotary
rows that the file pairs as (2i, 2i+1) are put into halves (i, i + dim/2), in queries and keys alike, which leaves every
attention score as it was and lets `models.rotary` turn them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from models.deepseek_config import DeepseekConfig, MoEConfig, Routing
from models.weights import EMBED, FINAL_NORM, HEAD


def deepseek_tensors(config: DeepseekConfig, get: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every fused tensor by name, made from `get(Hugging Face name)`; one layer's worth in memory at a time."""
    yield EMBED, get("model.embed_tokens.weight")
    yield FINAL_NORM, get("model.norm.weight")
    if not config.tied_embeddings:
        yield HEAD, get("lm_head.weight")
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        yield ours + "attention_norm.weight", get(theirs + "input_layernorm.weight")
        yield ours + "feed_forward_norm.weight", get(theirs + "post_attention_layernorm.weight")
        yield from _attention(config, ours, theirs + "self_attn.", get)
        if config.is_dense(layer) or config.moe is None:
            yield from _gated(ours, theirs + "mlp.", get)
        else:
            yield from _mixture(config.moe, ours, theirs + "mlp.", get)


def _attention(config: DeepseekConfig, ours: str, theirs: str, get: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    for kind in ("weight", "bias") if config.attention_bias else ("weight",):
        down = _halves(config, get(f"{theirs}kv_a_proj_with_mqa.{kind}"), config.kv_rank)
        if config.query_rank is not None:
            yield f"{ours}query_kv_a.{kind}", torch.cat((get(f"{theirs}q_a_proj.{kind}"), down))
        elif kind == "weight":
            yield f"{ours}query_kv_a.{kind}", torch.cat((_query_halves(config, get(f"{theirs}q_proj.weight")), down))
        else:
            unbiased = torch.zeros(config.num_heads * config.query_dim, dtype=down.dtype)
            yield f"{ours}query_kv_a.{kind}", torch.cat((unbiased, down))
        yield f"{ours}output.{kind}", get(f"{theirs}o_proj.{kind}")
    if config.query_rank is not None:
        yield f"{ours}query_a_norm.weight", get(f"{theirs}q_a_layernorm.weight")
        yield f"{ours}query_b.weight", _query_halves(config, get(f"{theirs}q_b_proj.weight"))
    if config.latent_norm:
        yield f"{ours}kv_a_norm.weight", get(f"{theirs}kv_a_layernorm.weight")
    yield f"{ours}kv_b.weight", get(f"{theirs}kv_b_proj.weight")


def _query_halves(config: DeepseekConfig, weight: Tensor) -> Tensor:
    heads = weight.view(config.num_heads, config.query_dim, -1)
    return torch.stack([_halves(config, head, config.nope_dim) for head in heads]).flatten(0, 1)


def _halves(config: DeepseekConfig, rows: Tensor, start: int) -> Tensor:
    """`rows` with the rotary ones, those from `start` on, de-interleaved."""
    if not config.interleaved:
        return rows
    return torch.cat((rows[:start], rows[start::2], rows[start + 1 :: 2]))


def _gated(ours: str, theirs: str, get: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield f"{ours}gate_up.weight", torch.cat([get(f"{theirs}{name}_proj.weight") for name in ("gate", "up")])
    yield f"{ours}down.weight", get(f"{theirs}down_proj.weight")


def _mixture(moe: MoEConfig, ours: str, theirs: str, get: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield f"{ours}router.weight", get(f"{theirs}gate.weight")
    if moe.routing is Routing.BIASED:
        yield f"{ours}router.bias", get(f"{theirs}gate.e_score_correction_bias")
    yield from _gated(f"{ours}shared.", f"{theirs}shared_experts.", get)
    experts = [dict(_gated("", f"{theirs}experts.{index}.", get)) for index in range(moe.routed_experts)]
    for name in ("gate_up.weight", "down.weight"):
        yield f"{ours}experts.{name}", torch.stack([expert[name] for expert in experts])


def deepseek_shapes(config: DeepseekConfig) -> dict[str, tuple[int, ...]]:
    """Fused name -> the shape it must have."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        parts = _attention_shapes(config)
        if config.is_dense(layer) or config.moe is None:
            parts |= _gated_shapes("", hidden, config.intermediate_size)
        else:
            parts |= _mixture_shapes(config.moe, hidden)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes


def _attention_shapes(config: DeepseekConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.num_heads
    queries = heads * config.query_dim
    first = (queries if config.query_rank is None else config.query_rank) + config.kv_rank + config.rope_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (hidden,),
        "feed_forward_norm.weight": (hidden,),
        "query_kv_a.weight": (first, hidden),
        "kv_b.weight": (heads * (config.nope_dim + config.value_dim), config.kv_rank),
        "output.weight": (hidden, heads * config.value_dim),
    }
    if config.latent_norm:
        shapes["kv_a_norm.weight"] = (config.kv_rank,)
    if config.query_rank is not None:
        shapes |= {"query_a_norm.weight": (config.query_rank,), "query_b.weight": (queries, config.query_rank)}
    if config.attention_bias:
        shapes |= {"query_kv_a.bias": (first,), "output.bias": (hidden,)}
    return shapes


def _gated_shapes(prefix: str, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}gate_up.weight": (2 * size, hidden), f"{prefix}down.weight": (hidden, size)}


def _mixture_shapes(moe: MoEConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    count, size = moe.routed_experts, moe.expert_size
    shapes = _gated_shapes("shared.", hidden, size * moe.shared_experts)
    shapes |= {"router.weight": (count, hidden)}
    shapes |= {"experts.gate_up.weight": (count, 2 * size, hidden), "experts.down.weight": (count, hidden, size)}
    if moe.routing is Routing.BIASED:
        shapes["router.bias"] = (count,)
    return shapes
