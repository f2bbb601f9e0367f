"""Rotary position embedding: the angle of every (position, frequency) pair, computed once a model.

Halves are rotated against each other, (i, i + head_dim/2), as Hugging Face weights are laid out; GGUF files of the llama
architecture store q and k for interleaved pairs and are un-permuted when they are read. Scaling rules: see `models.config`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.config import Rope, RopeScaling


def rotary_tables(rope: Rope, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [max_context, 1, dim]; the second axis broadcasts over heads."""
    amplitude = 1.0 if rope.scaling is None else rope.scaling.amplitude
    turning = frequencies(rope)
    angles = torch.outer(torch.arange(rope.max_context, dtype=torch.float32), turning)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return (angles.cos() * amplitude).to(device, dtype), (angles.sin() * amplitude).to(device, dtype)


def frequencies(rope: Rope) -> Tensor:
    """Angle a token, float32 [dim / 2]."""
    if rope.frequencies is not None:
        return torch.tensor(rope.frequencies, dtype=torch.float32)
    steps = torch.arange(0, rope.dim, 2, dtype=torch.float32)
    plain = 1.0 / (rope.theta ** (steps / rope.dim))
    return plain if rope.scaling is None else _scaled(plain, rope, rope.scaling)


def _scaled(frequencies: Tensor, rope: Rope, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        kept = _yarn_kept(rope, scaling)
    else:
        turns = scaling.original_context * frequencies / (2 * math.pi)
        ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = ramp.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def _yarn_kept(rope: Rope, scaling: RopeScaling) -> Tensor:
    """How much of each frequency is kept: a ramp over dimensions between those that turn often and those that turn seldom."""
    first, last = (_dimension_of(turns, rope, scaling) for turns in (scaling.high_freq_factor, scaling.low_freq_factor))
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - first) / max(last - first, 1e-3)
    return 1.0 - ramp.clamp(0.0, 1.0)


def _dimension_of(turns: float, rope: Rope, scaling: RopeScaling) -> float:
    """The (fractional) dimension whose angle goes round `turns` times in the original context."""
    return rope.dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`heads` [tokens, heads, head_dim] turned by the angles of its tokens; cos and sin are [tokens, 1, head_dim]."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cos + swapped * sin
