"""Projections: a matrix of weights that rows are multiplied with, kept as it is, or in eight or four bits.

- `FloatLinear` keeps the tensor, mapped to its file where it came from one.
- `StoredLinear` multiplies with the same floats, decoded on the way from the few bits in which their file holds them. A few
  rows, as in decoding, cost the reading of the weights, which are a fifth of the bytes; the floats are not even brought into
  memory. Without native kernels it is a `FloatLinear`.
- `Int8Linear` keeps int8 weights with a scale for every 32 inputs of an output, a quarter of the bytes. The rows it is given
  are rounded to 16 bits, a scale for every 32 elements, which loses less than the weights did by three orders of magnitude; a
  scale for a whole row, or eight bits, would let single large activations ruin their neighbours. Without native kernels torch
  multiplies with the weights expanded for the moment, which is right, and slow.
- `Int4Linear` keeps 16 steps from the least to the greatest of every 32 weights, with a scale and the least one: a sixth of the
  bytes. That is the arrangement of GGUF's Q4_1, so weights that come from such a file are kept as they are; others lose much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from models import native_kernels
from models.stored_weights import GROUP, LEAST, PACKED, SCALES, TILE
from models.weights import EMBED, HEAD

WEIGHT_FORMATS = ("full", "int8", "int4")
_LARGEST = 127.0
_STEPS = 15.0
_SENSITIVE = (EMBED, HEAD)  # logits are computed in eight bits at least
_PACK_ROWS = 4096  # packed at a time, so that a large matrix is never in memory twice

Linear: TypeAlias = Callable[[Tensor], Tensor]  # [rows, inputs] -> [rows, outputs]


class FloatLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        kernels = native_kernels.usable(x, self.weight)
        if kernels is None:
            return F.linear(x, self.weight, self.bias)
        return kernels.linear_float(x, self.weight, self.bias)


class StoredLinear(FloatLinear):
    """`scales`: what the packed integers are multiplied with, and what is added then, None in eight bits."""

    def __init__(
        self, weight: Tensor, packed: Tensor, scales: tuple[Tensor, Tensor | None], bias: Tensor | None = None
    ) -> None:
        super().__init__(weight, bias)
        self.packed = packed
        self.scales = scales

    def __call__(self, x: Tensor) -> Tensor:
        kernels = native_kernels.usable(x)
        if kernels is None:
            return super().__call__(x)
        return kernels.linear_stored(x, self.packed, self.scales, self.bias, len(self.weight))


class Int8Linear:
    """`weight` [outputs, inputs] rounded. Packed as the kernel reads it: [tiles, groups, pairs of inputs, outputs, 2]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.bias = bias
        parts = [_pack(weight[start : start + _PACK_ROWS].float()) for start in range(0, self.outputs, _PACK_ROWS)]
        self.packed = torch.cat([packed for packed, _ in parts])
        self.scales = torch.cat([scales for _, scales in parts])

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        kernels = native_kernels.usable(x)
        if kernels is None:
            return F.linear(x, self.expanded().to(x), self.bias)
        return kernels.linear_int8(x, self.packed, self.scales, self.bias, self.outputs)

    def expanded(self) -> Tensor:
        """The rounded weights, float32 [outputs, inputs]."""
        numbers = self.packed.permute(0, 3, 1, 2, 4).flatten(3).float()  # tiles, outputs, groups, inputs
        return (numbers * self.scales.transpose(1, 2)[..., None]).flatten(2).flatten(0, 1)[: self.outputs, : self.inputs]


class Int4Linear:
    """`weight` [outputs, inputs] rounded. Packed like int8 weights, but a pair of inputs in one byte, the first one low."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.bias = bias
        parts = [_pack_steps(weight[start : start + _PACK_ROWS].float()) for start in range(0, self.outputs, _PACK_ROWS)]
        self.packed, self.scales, self.least = (torch.cat(each) for each in zip(*parts, strict=True))

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        kernels = native_kernels.usable(x)
        if kernels is None:
            return F.linear(x, self.expanded().to(x), self.bias)
        return kernels.linear_int4(x, self.packed, (self.scales, self.least), self.bias, self.outputs)

    def expanded(self) -> Tensor:
        """The rounded weights, float32 [outputs, inputs]."""
        pairs = torch.stack((self.packed & 15, self.packed >> 4), dim=-1)
        steps = pairs.permute(0, 3, 1, 2, 4).flatten(3).float()  # tiles, outputs, groups, inputs
        scales, least = (each.transpose(1, 2)[..., None] for each in (self.scales, self.least))
        return (steps * scales + least).flatten(2).flatten(0, 1)[: self.outputs, : self.inputs]


def _pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    grouped = _grouped(weight)
    scales = grouped.abs().amax(dim=-1) / _LARGEST
    numbers = torch.where(scales[..., None] > 0, grouped / scales[..., None], 0.0).round_().to(torch.int8)
    return _paired(numbers).contiguous(), scales.transpose(1, 2).contiguous()


def _pack_steps(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grouped = _grouped(weight)
    least = grouped.amin(dim=-1)
    scales = (grouped.amax(dim=-1) - least) / _STEPS
    steps = torch.where(scales[..., None] > 0, (grouped - least[..., None]) / scales[..., None], 0.0).round_().to(torch.uint8)
    pairs = _paired(steps)
    packed = pairs[..., 0] | (pairs[..., 1] << 4)
    return packed.contiguous(), scales.transpose(1, 2).contiguous(), least.transpose(1, 2).contiguous()


def _grouped(weight: Tensor) -> Tensor:
    """[tiles, outputs, groups, inputs], padded with zeros."""
    padded = F.pad(weight, (0, -weight.shape[1] % GROUP, 0, -weight.shape[0] % TILE))
    return padded.view(padded.shape[0] // TILE, TILE, padded.shape[1] // GROUP, GROUP)


def _paired(numbers: Tensor) -> Tensor:
    """[tiles, groups, pairs of inputs, outputs, 2], as the kernel reads them."""
    return numbers.view(*numbers.shape[:-1], GROUP // 2, 2).permute(0, 2, 3, 1, 4)


class Projections:
    """Makes the projections of one model from its fused weights, in one format, but for the sensitive ones."""

    def __init__(self, weights: Mapping[str, Tensor], weight_format: str = "full") -> None:
        if weight_format not in WEIGHT_FORMATS:
            raise ValueError(f"weights is {weight_format!r}; allowed: {', '.join(WEIGHT_FORMATS)}")
        self._weights = weights
        self._format = weight_format

    def __call__(self, weight: str, part: int | None = None) -> Linear:
        """The projection by the name of its weight, with its bias where it has one; `part` of a stack of several."""
        bias = self._weights.get(f"{weight.removesuffix('weight')}bias")
        matrix = self._weights[weight] if part is None else self._weights[weight][part]
        if self._format == "full":
            return self._exact(weight, matrix, bias) if part is None else FloatLinear(matrix, bias)
        return Int8Linear(matrix, bias) if self._format == "int8" or weight in _SENSITIVE else Int4Linear(matrix, bias)

    def _exact(self, name: str, matrix: Tensor, bias: Tensor | None) -> Linear:
        packed = self._weights.get(name + PACKED)
        if packed is None:
            return FloatLinear(matrix, bias)
        return StoredLinear(matrix, packed, (self._weights[name + SCALES], self._weights.get(name + LEAST)), bias)
