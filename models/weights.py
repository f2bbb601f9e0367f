"""The tensors of a decoder under two sets of names: Hugging Face's, one matrix a projection, and ours, fused.

Fused is what the kernels want: q, k and v in one matrix, gate and up in another, so that a layer takes four matrix products.
A prepared model on disk is stored fused, so that workers on one machine map the same file and share its pages. The functions
here only name, concatenate and split; they work on numpy arrays and on torch tensors alike, and import neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from models.config import ModelConfig

EMBED = "embed.weight"
FINAL_NORM = "norm.weight"
HEAD = "head.weight"


def fused_tensors(
    config: ModelConfig, get: Callable[[str], Any], concatenate: Callable[[list[Any]], Any]
) -> Iterator[tuple[str, Any]]:
    """Every fused tensor by name, made from `get(Hugging Face name)`; one layer's worth in memory at a time."""
    yield EMBED, get("model.embed_tokens.weight")
    yield FINAL_NORM, _norm(config, FINAL_NORM, get("model.norm.weight"))
    if not config.tied_embeddings:
        yield HEAD, get("lm_head.weight")
    for name, parts in layer_parts(config).items():
        tensors = [get(part) for part in parts]
        yield name, _norm(config, name, tensors[0] if len(tensors) == 1 else concatenate(tensors))


def _norm(config: ModelConfig, name: str, tensor: Any) -> Any:
    """Gemma's files hold a norm's weight less one."""
    return tensor + 1 if config.gemma is not None and name.endswith("norm.weight") else tensor


def layer_parts(config: ModelConfig) -> dict[str, list[str]]:
    """Fused name -> the Hugging Face names whose rows it holds, in order, for all layers."""
    parts: dict[str, list[str]] = {}
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        qkv = [f"{theirs}.self_attn.{x}_proj" for x in "qkv"]
        parts[f"{ours}.attention_norm.weight"] = [f"{theirs}.input_layernorm.weight"]
        parts[f"{ours}.qkv.weight"] = [f"{name}.weight" for name in qkv]
        parts[f"{ours}.output.weight"] = [f"{theirs}.self_attn.o_proj.weight"]
        if config.gemma is None:
            parts[f"{ours}.feed_forward_norm.weight"] = [f"{theirs}.post_attention_layernorm.weight"]
        else:
            parts[f"{ours}.attended_norm.weight"] = [f"{theirs}.post_attention_layernorm.weight"]
            parts[f"{ours}.feed_forward_norm.weight"] = [f"{theirs}.pre_feedforward_layernorm.weight"]
            parts[f"{ours}.fed_norm.weight"] = [f"{theirs}.post_feedforward_layernorm.weight"]
        parts[f"{ours}.gate_up.weight"] = [f"{theirs}.mlp.{x}_proj.weight" for x in ("gate", "up")]
        parts[f"{ours}.down.weight"] = [f"{theirs}.mlp.down_proj.weight"]
        if config.qkv_bias:
            parts[f"{ours}.qkv.bias"] = [f"{name}.bias" for name in qkv]
        if config.output_bias:
            parts[f"{ours}.output.bias"] = [f"{theirs}.self_attn.o_proj.bias"]
        if config.qk_norm:
            parts[f"{ours}.query_norm.weight"] = [f"{theirs}.self_attn.q_norm.weight"]
            parts[f"{ours}.key_norm.weight"] = [f"{theirs}.self_attn.k_norm.weight"]
    return parts


def in_layers(config: ModelConfig, name: str, layers: range) -> bool:
    """Whether computing `layers` takes a fused tensor: their own, the embedding before the first, the head after the last."""
    last = config.num_layers - 1 in layers
    if name == EMBED:
        return 0 in layers or (last and config.tied_embeddings)
    return last if name in (FINAL_NORM, HEAD) else int(name.split(".")[1]) in layers


def split_tensors(config: ModelConfig, fused: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `fused_tensors`: Hugging Face names to views into the fused tensors."""
    tensors = {"model.embed_tokens.weight": fused[EMBED], "model.norm.weight": fused[FINAL_NORM]}
    if not config.tied_embeddings:
        tensors["lm_head.weight"] = fused[HEAD]
    for name, parts in layer_parts(config).items():
        start = 0
        for part, rows in zip(parts, _rows(config, name, fused[name]), strict=True):
            tensors[part] = fused[name][start : start + rows]
            start += rows
    return tensors


def _rows(config: ModelConfig, name: str, tensor: Any) -> list[int]:
    if ".qkv." in name:
        kv_rows = config.num_kv_heads * config.head_dim
        return [config.num_heads * config.head_dim, kv_rows, kv_rows]
    if ".gate_up." in name:
        return [config.intermediate_size] * 2
    return [tensor.shape[0]]


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Fused name -> the shape it must have."""
    hidden, head_dim = config.hidden_size, config.head_dim
    query = config.num_heads * head_dim
    qkv = query + 2 * config.num_kv_heads * head_dim
    by_suffix: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (hidden,),
        "qkv.weight": (qkv, hidden),
        "qkv.bias": (qkv,),
        "output.weight": (hidden, query),
        "output.bias": (hidden,),
        "attended_norm.weight": (hidden,),
        "feed_forward_norm.weight": (hidden,),
        "fed_norm.weight": (hidden,),
        "gate_up.weight": (2 * config.intermediate_size, hidden),
        "down.weight": (hidden, config.intermediate_size),
        "query_norm.weight": (head_dim,),
        "key_norm.weight": (head_dim,),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for name in layer_parts(config):
        shapes[name] = by_suffix[name.split(".", 2)[2]]
    return shapes
