"""Weights in the few bits in which a file holds them, arranged as the native kernels read them.

Nothing is rounded: a weight is its number times its scale, plus the least weight of its group where there is one, and these
are the file's. GGUF's Q4_1 (16 steps) and Q8_0 (bytes) have this form, with 32 inputs of an output to a group. Such a tensor
NAME lies in a prepared folder beside its floats as NAME.packed, NAME.scales and NAME.least. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import gguf
import numpy as np
from numpy.typing import NDArray

GROUP = 32  # elements of a row of weights or activations that share a scale
TILE = 16  # rows of weights that lie together
STORED_WEIGHTS = "stored.safetensors"
PACKED, SCALES, LEAST = ".packed", ".scales", ".least"
_HALF_BYTES = 2
_Number = TypeVar("_Number", np.uint8, np.float32)


def stored_tensors(
    name: str, parts: Sequence[tuple[gguf.GGMLQuantizationType, NDArray[np.uint8]]]
) -> dict[str, NDArray[np.generic]]:
    """The tensors that hold `name`, whose rows are those of `parts` (a type, and rows of its blocks); none where the parts are
    of several types, or of another than those two."""
    kinds = {kind for kind, _ in parts}
    if kinds == {gguf.GGMLQuantizationType.Q4_1}:
        return _of_steps(name, np.concatenate([_blocks(rows, 4 + GROUP // 2) for _, rows in parts]))
    if kinds == {gguf.GGMLQuantizationType.Q8_0}:
        return _of_bytes(name, np.concatenate([_blocks(rows, 2 + GROUP) for _, rows in parts]))
    return {}


def _blocks(rows: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """[rows, groups, bytes of a block]."""
    return rows.reshape(len(rows), -1, size)


def _of_steps(name: str, blocks: NDArray[np.uint8]) -> dict[str, NDArray[np.generic]]:
    halves = blocks[..., 2 * _HALF_BYTES :]
    pairs = _paired(np.concatenate((halves & 15, halves >> 4), axis=-1))
    packed = pairs[..., 0] | (pairs[..., 1] << 4)
    return {
        name + PACKED: np.ascontiguousarray(packed),
        name + SCALES: _factors(blocks[..., :_HALF_BYTES]),
        name + LEAST: _factors(blocks[..., _HALF_BYTES : 2 * _HALF_BYTES]),
    }


def _of_bytes(name: str, blocks: NDArray[np.uint8]) -> dict[str, NDArray[np.generic]]:
    packed = np.ascontiguousarray(_paired(blocks[..., _HALF_BYTES:])).view(np.int8)
    return {name + PACKED: packed, name + SCALES: _factors(blocks[..., :_HALF_BYTES])}


def _tiled(numbers: NDArray[_Number]) -> NDArray[_Number]:
    """[tiles, outputs, ...], padded with zeros."""
    padded = np.pad(numbers, ((0, -len(numbers) % TILE), *([(0, 0)] * (numbers.ndim - 1))))
    return padded.reshape(-1, TILE, *numbers.shape[1:])


def _paired(numbers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[tiles, groups, pairs of inputs, outputs, 2] of [rows, groups, inputs]."""
    tiled = _tiled(numbers)
    pairs: NDArray[np.uint8] = tiled.reshape(*tiled.shape[:-1], GROUP // 2, 2).transpose(0, 2, 3, 1, 4)
    return pairs


def _factors(halves: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[tiles, groups, outputs] of the bytes of float16 numbers [rows, groups, 2]."""
    factors = _tiled(np.ascontiguousarray(halves).view(np.float16)[..., 0].astype(np.float32))
    return np.ascontiguousarray(factors.swapaxes(1, 2))
