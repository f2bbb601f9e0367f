"""Grouped-query attention turned into latent attention, without training: fewer KV bytes a token for some loss.

Method, layer by layer, from the keys and values that a model keeps of a calibration text:

1. Across KV heads. The pairs that turn at one frequency are rotated over the heads by a PCA of their own, the same for both
   members of a pair. This commutes with the rotary embedding, so it changes no score (RoRoPE in TransMLA, Meng et al. 2025).
2. Rotary or not. Of all (component, frequency) pairs those are kept rotary whose loss would cost most: energy times how far
   the frequency turns within `reach_tokens` (partial RoPE in MHA2MLA, Ji et al. 2025). They form the shared rotary key; the
   others lose their rotation, which is where the conversion is no longer exact.
3. What is left of the keys, and the values, balanced to equal energy, share one latent: the first `rank` principal
   components of both together.

The result is a `Deepseek` without a norm on its latents. It does not adapt other weights: fine-tuning is out of scope.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.base import ForwardBatch, PagedKVCache
from models.config import ModelConfig, Rope
from models.deepseek import Deepseek
from models.deepseek_config import DeepseekConfig
from models.errors import ModelFileError
from models.latent_config import LATENT_ARCHITECTURE
from models.llama import Llama
from models.rotary import frequencies, rotary_tables, rotate


@dataclass(frozen=True, slots=True)
class Calibration:
    """Keys without their rotation [layers, tokens, kv_heads, head_dim], and values likewise, of one text."""

    keys: Tensor
    values: Tensor


def calibrate(model: Llama, tokens: Sequence[int], block_tokens: int = 64) -> Calibration:
    table = list(range(-(-len(tokens) // block_tokens)))
    cache = PagedKVCache(model.layout, len(table), block_tokens)
    model.forward(ForwardBatch(torch.tensor(tokens), [len(tokens)], [0], [table]), cache)
    kv = torch.stack([layer.flatten(0, 1)[: len(tokens)] for layer in cache.layers]).float()
    cos, sin = rotary_tables(model.config.rope, kv.device, torch.float32)
    keys = torch.stack([rotate(layer, cos[: len(tokens)], -sin[: len(tokens)]) for layer in kv[:, :, 0]])
    return Calibration(keys, kv[:, :, 1])


@dataclass(frozen=True, slots=True)
class _Rotation:
    """`bases` [layers, pairs, kv_heads, components]: the PCA of each pair; `rotary`, `still`: (component, pair) index pairs
    [2, n], the same in all layers, that keep their rotation or lose it."""

    bases: Tensor
    rotary: Tensor
    still: Tensor


def _as_pairs(heads: Tensor) -> Tensor:
    """[..., kv_heads, head_dim] as [..., kv_heads, pairs, 2]."""
    return torch.stack(heads.chunk(2, dim=-1), dim=-1)


def _find_rotation(calibration: Calibration, rope: Rope, rope_dim: int, reach_tokens: int) -> _Rotation:
    pairs = _as_pairs(calibration.keys)
    covariance = torch.einsum("lthpx,ltgpx->lphg", pairs, pairs) / pairs.shape[1]
    energy, bases = torch.linalg.eigh(covariance)
    energy, bases = energy.flip(-1), bases.flip(-1)
    share = (energy / energy.sum(dim=(1, 2), keepdim=True)).mean(dim=0).T  # [components, pairs]
    distances = torch.arange(1, reach_tokens + 1)
    turned = 1.0 - torch.outer(frequencies(rope), distances).cos().mean(dim=1)
    ranked = (share * turned).flatten().argsort(descending=True)
    count = share.shape[1]
    both = torch.stack((ranked // count, ranked % count))
    return _Rotation(bases, both[:, : rope_dim // 2], both[:, rope_dim // 2 :])


def convert_to_latent(
    model: Llama,
    weights: Mapping[str, Tensor],
    calibration: Calibration,
    *,
    rank: int,
    rope_dim: int,
    reach_tokens: int = 512,
) -> Deepseek:
    """`model`, whose fused weights are `weights`, with `rank` + `rope_dim` numbers a token and layer; see `latent_model`."""
    config, converted = latent_model(model, weights, calibration, rank=rank, rope_dim=rope_dim, reach_tokens=reach_tokens)
    return Deepseek(config, converted, model.layout.dtype)


def latent_model(
    model: Llama,
    weights: Mapping[str, Tensor],
    calibration: Calibration,
    *,
    rank: int,
    rope_dim: int,
    reach_tokens: int = 512,
) -> tuple[DeepseekConfig, dict[str, Tensor]]:
    """Configuration and fused weights of the conversion.

    Raises `ModelFileError` for what cannot be converted: normed or biased keys, windows, sizes that do not fit.
    """
    config = model.config
    _check(config, rank, rope_dim)
    rotation = _find_rotation(calibration, config.rope, rope_dim, reach_tokens)
    turning = frequencies(config.rope)[rotation.rotary[1]]
    target = _target_config(config, rank, rope_dim, tuple(turning.tolist()))
    converted = {name: tensor for name, tensor in weights.items() if ".qkv." not in name}
    for layer in range(config.num_layers):
        keys, values = calibration.keys[layer], calibration.values[layer]
        parts = _Projections(weights[f"layers.{layer}.qkv.weight"].float(), config, rotation.bases[layer])
        queries = torch.cat((parts.queries(rotation.still), parts.queries(rotation.rotary)), dim=1)
        still_keys = parts.rotated(_as_pairs(keys), rotation.still)
        down, up = _shared_latent(still_keys, values.flatten(1), rank)
        rows = torch.cat((parts.keys(rotation.still), parts.value_rows))
        first = torch.cat((queries.flatten(0, 1), down @ rows, parts.keys(rotation.rotary)))
        converted[f"layers.{layer}.query_kv_a.weight"] = first
        converted[f"layers.{layer}.kv_b.weight"] = _per_head(up, config, still_keys.shape[1])
    return target, converted


def _check(config: ModelConfig, rank: int, rope_dim: int) -> None:
    if config.qk_norm or config.qkv_bias or any(config.layer_windows):
        raise ModelFileError(f"{config.architecture} has normed or biased keys or windows; conversion is for plain attention")
    keys = config.num_kv_heads * config.head_dim
    if rope_dim % 2 or not 2 <= rope_dim < keys:
        raise ModelFileError(f"rope_dim is {rope_dim}; allowed: an even number from 2 to {keys - 2}")
    if not 1 <= rank <= 2 * keys - rope_dim:
        raise ModelFileError(f"rank is {rank}; allowed: 1 to {2 * keys - rope_dim}")


def _target_config(config: ModelConfig, rank: int, rope_dim: int, turning: tuple[float, ...]) -> DeepseekConfig:
    return DeepseekConfig(
        architecture=LATENT_ARCHITECTURE,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        max_context=config.max_context,
        norm_eps=config.norm_eps,
        query_rank=None,
        kv_rank=rank,
        rope_dim=rope_dim,
        nope_dim=config.num_kv_heads * config.head_dim - rope_dim,
        value_dim=config.head_dim,
        rope=Rope(rope_dim, config.rope_theta, config.max_context, frequencies=turning),
        softmax_scale=config.head_dim**-0.5,
        dense_layers=config.num_layers,
        moe=None,
        interleaved=False,
        tied_embeddings=config.tied_embeddings,
        latent_norm=False,
    )


class _Projections:
    """One layer's projections, carried into the rotated bases [pairs, kv_heads, components]."""

    def __init__(self, qkv: Tensor, config: ModelConfig, bases: Tensor) -> None:
        dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
        queries, keys, self.value_rows = qkv.tensor_split((heads * dim, (heads + kv_heads) * dim))
        self._queries = torch.stack(queries.view(heads, dim, -1).chunk(2, dim=1), dim=2)  # [heads, pairs, 2, hidden]
        self._keys = torch.stack(keys.view(kv_heads, dim, -1).chunk(2, dim=1), dim=2)
        self._group = torch.arange(heads) // (heads // kv_heads)
        self._bases = bases

    def queries(self, chosen: Tensor) -> Tensor:
        """[heads, 2n, hidden]: what each head asks of the chosen pairs, first members before second ones."""
        component, pair = chosen
        weight = self._bases[pair][:, self._group, :].gather(2, component[:, None, None].expand(-1, len(self._group), 1))
        picked = self._queries[:, pair] * weight[:, :, 0].T[:, :, None, None]
        return picked.transpose(1, 2).flatten(1, 2)

    def keys(self, chosen: Tensor) -> Tensor:
        """[2n, hidden]."""
        component, pair = chosen
        weight = self._bases[pair, :, component]  # [n, kv_heads]
        return torch.einsum("nh,hnxd->xnd", weight, self._keys[:, pair]).flatten(0, 1)

    def rotated(self, pairs: Tensor, chosen: Tensor) -> Tensor:
        """[tokens, 2n] of activations [tokens, kv_heads, pairs, 2]."""
        component, pair = chosen
        return torch.einsum("nh,thnx->txn", self._bases[pair, :, component], pairs[:, :, pair]).flatten(1)


def _shared_latent(keys: Tensor, values: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Down [rank, keys + values] and up [keys + values, rank] projections of the two together, balanced."""
    balance = keys.pow(2).mean().sqrt() / values.pow(2).mean().sqrt().clamp(min=1e-12)
    scale = torch.cat((torch.ones(keys.shape[1]), balance.expand(values.shape[1])))
    both = torch.cat((keys, values), dim=1) * scale
    basis = torch.linalg.eigh(both.T @ both).eigenvectors.flip(-1)[:, :rank]
    return basis.T * scale, basis / scale[:, None]


def _per_head(up: Tensor, config: ModelConfig, nope_dim: int) -> Tensor:
    """The up-projection [heads * (nope_dim + value_dim), rank]: every head has all keys and its own group's values."""
    values = up[nope_dim:].view(config.num_kv_heads, config.head_dim, -1)
    values = values.repeat_interleave(config.num_heads // config.num_kv_heads, dim=0)
    keys = up[:nope_dim].expand(config.num_heads, -1, -1)
    return torch.cat((keys, values), dim=1).flatten(0, 1)
