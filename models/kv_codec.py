"""KV in fewer bytes: encode to packed rows for a tier or a wire, decode back, vectorised.

One row is one token's state in one layer, flattened; it becomes the packed numbers followed by their scales. The formats, and
how many bytes a row takes, are those of `models.kv_layout`:

- fp32, bf16, fp16: rounded to nearest, no scales;
- fp8: e4m3 numbers, one power-of-two scale (e8m0) for 64 elements, so that scaling itself rounds nothing;
- int8: symmetric, one fp16 scale for 64 elements;
- fp4: e2m1 numbers, two a byte, one e4m3 scale for 16 elements, rounded up so that nothing is clipped;
- mxfp4: e2m1 numbers, one power-of-two scale for 32 elements, as the OCP microscaling formats have it.

Scaled formats turn every head's numbers by an orthogonal (Hadamard) rotation first, and back after decoding. Keys have a few
channels far larger than the others, in which queries are large too; rounding relative to a number's own size errs most exactly
there. Rotated, the error is the same in sum and spread over all channels, and attention scores move less.

`max_error` bounds what a round trip may change. State of infinities or NaN is refused: it would spoil its group's scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from models.base import KVLayout
from models.kv_layout import NumberFormat, number_format

_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1, by code; bit 3 is the sign
_FP4_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_ROTATED_ELEMENTS = 64  # at most so many are turned together: a head of most models
_E8M0_BIAS = 127
_E8M0_LARGEST = 254  # 255 is NaN


@dataclass(frozen=True, slots=True)
class _Numbers:
    """How scaled numbers are written: the largest magnitude, and what rounding may change, relative to a number that is not
    subnormal and in absolute terms near zero."""

    largest: float
    half_step_relative: float
    half_step_absolute: float
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]


def _pack_fp8(scaled: Tensor) -> Tensor:
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def _unpack_fp8(packed: Tensor) -> Tensor:
    return packed.view(torch.float8_e4m3fn).float()


def _pack_int8(scaled: Tensor) -> Tensor:
    return scaled.round().to(torch.int8).view(torch.uint8)


def _unpack_int8(packed: Tensor) -> Tensor:
    return packed.view(torch.int8).float()


def _pack_fp4(scaled: Tensor) -> Tensor:
    codes = torch.bucketize(scaled.abs(), torch.tensor(_FP4_MIDPOINTS, device=scaled.device)).to(torch.uint8)
    codes |= torch.signbit(scaled).to(torch.uint8) << 3
    return codes[..., ::2] | codes[..., 1::2] << 4


def _unpack_fp4(packed: Tensor) -> Tensor:
    values = torch.tensor(_FP4_VALUES, device=packed.device)
    table = torch.cat((values, -values))
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return table[codes.int()]


_NUMBERS = {
    "fp8": _Numbers(448.0, 2.0**-4, 2.0**-10, _pack_fp8, _unpack_fp8),
    "int8": _Numbers(127.0, 0.0, 0.5, _pack_int8, _unpack_int8),
    "fp4": _Numbers(6.0, 2.0**-2, 0.25, _pack_fp4, _unpack_fp4),
    "mxfp4": _Numbers(6.0, 2.0**-2, 0.25, _pack_fp4, _unpack_fp4),
}


def _e8m0_scales(needed: Tensor) -> Tensor:
    """The least power of two that is not below `needed`, as its biased exponent."""
    mantissa, exponent = torch.frexp(needed)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return (exponent + _E8M0_BIAS).clamp_(0, _E8M0_LARGEST).to(torch.uint8)[..., None]


def _from_e8m0(stored: Tensor) -> Tensor:
    return torch.exp2(stored[..., 0].float() - _E8M0_BIAS)


def _e4m3_scales(needed: Tensor) -> Tensor:
    """The least e4m3 number that is not below `needed`; the largest where there is none."""
    nearest = needed.clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    below = nearest.view(torch.float8_e4m3fn).float() < needed
    return (nearest + (below & (nearest < 0x7E))).to(torch.uint8)[..., None]  # neighbours' codes follow each other


def _from_e4m3(stored: Tensor) -> Tensor:
    return stored[..., 0].contiguous().view(torch.float8_e4m3fn).float()


def _fp16_scales(needed: Tensor) -> Tensor:
    nearest = needed.clamp(max=65504.0).to(torch.float16)
    up = torch.nextafter(nearest, torch.full_like(nearest, math.inf)).clamp(max=65504.0)
    return torch.where(nearest.float() < needed, up, nearest)[..., None].contiguous().view(torch.uint8)


def _from_fp16(stored: Tensor) -> Tensor:
    return stored.contiguous().view(torch.float16)[..., 0].float()


_SCALES = {
    "fp8": (_e8m0_scales, _from_e8m0),
    "int8": (_fp16_scales, _from_fp16),
    "fp4": (_e4m3_scales, _from_e4m3),
    "mxfp4": (_e8m0_scales, _from_e8m0),
}


@cache
def _hadamard(size: int) -> Tensor:
    """The symmetric orthogonal matrix of `size` (a power of two) whose entries all have one magnitude: its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / math.sqrt(size)


class KVCodec:
    """Encodes rows of `elements` numbers in the format `name`. Holds no state: may be shared between threads.

    `rotate` False leaves out the rotation of scaled formats. Groups of the largest power of two that divides `elements`, up to
    64, are turned together.
    """

    def __init__(self, name: str, elements: int, *, rotate: bool = True) -> None:
        if elements < 1:
            raise ValueError(f"elements is {elements}; allowed: a positive number")
        self.format: NumberFormat = number_format(name)
        self.elements = elements
        self._turned = math.gcd(elements, _ROTATED_ELEMENTS) if rotate and self.format.group is not None else 1

    @property
    def row_bytes(self) -> int:
        return self.format.bytes_for(self.elements)

    def encode(self, rows: Tensor) -> Tensor:
        """`rows` [..., elements] of any float dtype as uint8 [..., row_bytes]. Raises `ValueError` unless all are finite."""
        if rows.shape[-1] != self.elements:
            raise ValueError(f"rows have {rows.shape[-1]} elements; this codec was made for {self.elements}")
        if self.format.group is None:
            return rows.to(_PLAIN[self.format.name]).contiguous().view(torch.uint8)
        groups = self._grouped(self._rotated(rows.float()))
        largest = groups.abs().amax(dim=-1)
        if not bool(torch.isfinite(largest).all()):
            raise ValueError(f"rows hold infinities or NaN; {self.format.name} encodes finite numbers only")
        write, read = _SCALES[self.format.name]
        numbers = _NUMBERS[self.format.name]
        scales = write(largest / numbers.largest)
        scale = read(scales)[..., None]
        scaled = torch.where(scale > 0, groups / scale, 0.0).clamp_(-numbers.largest, numbers.largest)
        packed = numbers.pack(self._ungrouped(scaled, even=True))
        return torch.cat((packed, scales.flatten(-2)), dim=-1)

    def decode(self, packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What `encode` returned, as [..., elements]."""
        if packed.dtype != torch.uint8 or packed.shape[-1] != self.row_bytes:
            raise ValueError(f"packed rows are {packed.dtype} of {packed.shape[-1]} bytes; expected uint8 of {self.row_bytes}")
        if self.format.group is None:
            return packed.contiguous().view(_PLAIN[self.format.name]).to(dtype)
        groups = -(-self.elements // self.format.group)
        numbers, scales = packed.tensor_split((self.row_bytes - groups * self.format.scale_bytes,), dim=-1)
        scale = _SCALES[self.format.name][1](scales.reshape(*scales.shape[:-1], groups, self.format.scale_bytes))
        values = _NUMBERS[self.format.name].unpack(numbers.contiguous())[..., : self.elements]
        return self._rotated(self._ungrouped(self._grouped(values) * scale[..., None], even=False)).to(dtype)

    def max_error(self, rows: Tensor) -> Tensor:
        """[..., elements]: no element of `rows` may differ by more after a round trip (in exact arithmetic)."""
        rows = rows.float()
        if self.format.group is None:
            info = torch.finfo(_PLAIN[self.format.name])
            return rows.abs() * info.eps / 2 + info.smallest_normal * info.eps
        numbers = _NUMBERS[self.format.name]
        groups = self._grouped(self._rotated(rows))
        write, read = _SCALES[self.format.name]
        needed = groups.abs().amax(dim=-1) / numbers.largest
        scale = read(write(needed))[..., None]
        clipped = (groups.abs() - scale * numbers.largest).clamp(min=0.0)
        rounding = torch.maximum(groups.abs() * numbers.half_step_relative, scale * numbers.half_step_absolute)
        return self._spread(self._ungrouped(rounding + clipped, even=False))

    def _rotated(self, rows: Tensor) -> Tensor:
        """The rows turned, or turned back."""
        if self._turned == 1:
            return rows
        turned = rows.reshape(*rows.shape[:-1], -1, self._turned) @ _hadamard(self._turned).to(rows.device)
        return turned.flatten(-2)

    def _spread(self, errors: Tensor) -> Tensor:
        """What errors of at most this much in the rotated numbers come to in each of the numbers themselves."""
        if self._turned == 1:
            return errors
        groups = errors.reshape(*errors.shape[:-1], -1, self._turned)
        together = groups.sum(dim=-1, keepdim=True) / math.sqrt(self._turned)
        return together.expand(*together.shape[:-1], self._turned).flatten(-2)

    def _grouped(self, rows: Tensor) -> Tensor:
        """[..., groups, group], the last group padded with zeros."""
        assert self.format.group is not None
        padding = -self.elements % self.format.group
        return F.pad(rows, (0, padding)).view(*rows.shape[:-1], -1, self.format.group)

    def _ungrouped(self, groups: Tensor, *, even: bool) -> Tensor:
        """The elements without padding, save for one if `even` asks for an even number of them."""
        return groups.flatten(-2)[..., : self.elements + (self.elements % 2 if even and self.format.bits == 4 else 0)]


class BlockCodec:
    """The same for whole blocks of a paged cache, as bytes that a tier stores or a transport moves in place of the cache's own.

    Both ways take and give uint8 [blocks, bytes of a block in one layer]: a caller knows sizes, and nothing of numbers.
    """

    def __init__(self, name: str, layout: KVLayout, block_tokens: int) -> None:
        self._codec = KVCodec(name, layout.elements)
        self._dtype = layout.dtype
        self._block_tokens = block_tokens
        self.layer_block_bytes = block_tokens * self._codec.row_bytes
        self.plain_layer_block_bytes = block_tokens * layout.elements * layout.dtype.itemsize

    @property
    def name(self) -> str:
        return self._codec.format.name

    @property
    def keeps_bits(self) -> bool:
        """Whether decoding gives back exactly what was encoded."""
        return _PLAIN.get(self.name) in (self._dtype, torch.float32)

    def encode(self, blocks: Tensor) -> Tensor:
        """Raises `ValueError` for other sizes, or numbers that are not finite in a format with scales."""
        self._check(blocks, self.plain_layer_block_bytes)
        rows = blocks.contiguous().view(self._dtype).view(len(blocks), self._block_tokens, -1)
        return self._codec.encode(rows).flatten(1)

    def decode(self, packed: Tensor) -> Tensor:
        self._check(packed, self.layer_block_bytes)
        rows = packed.view(len(packed), self._block_tokens, -1)
        return self._codec.decode(rows, self._dtype).flatten(1).contiguous().view(torch.uint8)

    @staticmethod
    def _check(blocks: Tensor, size: int) -> None:
        if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] != size:
            raise ValueError(f"blocks are {blocks.dtype} {tuple(blocks.shape)}; expected uint8 [blocks, {size}]")
