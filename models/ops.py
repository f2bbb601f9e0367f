"""Small steps between the projections, by the native kernel where there is one for the tensor at hand, else by torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from models import native_kernels


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Every last axis over its root mean square, times `weight`."""
    kernels = native_kernels.usable(values, weight)
    if kernels is None:
        return F.rms_norm(values, (values.shape[-1],), weight, eps)
    return kernels.rms_norm(values, weight, eps)


def gated_silu(gate_up: Tensor) -> Tensor:
    """[rows, 2 * size] to [rows, size]: the first half through SiLU, times the second."""
    kernels = native_kernels.usable(gate_up)
    if kernels is None:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    return kernels.gate(gate_up)
