"""Rotary position embedding: the angle of every (position, frequency) pair, computed once a model.

Halves are rotated against each other, (i, i + head_dim/2), as Hugging Face weights are laid out; GGUF files of the llama
architecture store q and k for interleaved pairs and are un-permuted when they are read. Scaling rules: see `models.config`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.config import ModelConfig, RopeScaling


def rotary_tables(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [max_context, 1, head_dim]; the second axis broadcasts over heads."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / (config.rope_theta ** (steps / config.head_dim))
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    angles = torch.outer(torch.arange(config.max_context, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_context * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`heads` [tokens, heads, head_dim] turned by the angles of its tokens; cos and sin are [tokens, 1, head_dim]."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cos + swapped * sin
