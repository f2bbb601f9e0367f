"""The compiled inner loops of a CPU (`native/`): built once a machine, loaded, called on tensors.

Without a compiler, or where it fails, `kernels()` is None, a warning says so once, and callers compute the same by torch. The
library lies in the user's cache under a digest of its sources, its compiler, its flags and the processor, so a cache that
several kinds of machines share is never mistaken. It uses torch's own OpenMP threads, as many as torch may use at that moment.
Arguments are float32 on the CPU and contiguous: `usable` tells.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.cache import cache_root, locked, scratch_folder
from models.errors import ModelError

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "native"
SOURCES = tuple(FOLDER / name for name in ("kernels.cpp", "products.cpp", "stored.cpp", "few_bits.cpp", "chunks.cpp"))
HEADERS = tuple(sorted(FOLDER.glob("*.h")))
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
LINK = ("-fopenmp", "-shared", "-fPIC")
FEW_ROWS = 32  # up to as many rows, reading the weights is what a product costs
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
MAX_SHARE = 64  # query heads of one KV head
_BUILD_TIMEOUT_S = 300

_pointer, _size, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "linear_float": (*[_pointer] * 4, *[_size] * 3, _int),
    "linear_many": (*[_pointer] * 4, *[_size] * 3, _int),
    "linear_stored": (*[_pointer] * 6, *[_size] * 3, _int),
    "linear_many_stored": (*[_pointer] * 6, *[_size] * 3, _int),
    "linear_int8": (*[_pointer] * 5, *[_size] * 3, _int),
    "linear_int4": (*[_pointer] * 6, *[_size] * 3, _int),
    "rms_norm": (*[_pointer] * 3, *[_size] * 2, _float, _int),
    "gate": (*[_pointer] * 2, *[_size] * 2, _int),
    "rotate_and_store": (*[_pointer] * 4, _int, _pointer, *[_size] * 4, _int),
    "attend_decode": (
        *(_pointer, _size, _pointer, _int, _pointer, _size, _pointer, _pointer),
        *([_size] * 5),
        *(_float, _float, _pointer, _int),
    ),
    "attend_chunk": (
        *(_pointer, _size, _pointer, _int, _pointer),
        *([_size] * 8),
        *(_float, _float, _int, _pointer, _int),
    ),
}


class BuildError(ModelError):
    """The kernels could not be compiled here."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the last tokens of one sequence see: `total` tokens, themselves among them, in the blocks `table` (int64); each
    `window` tokens back (None: all), and none before `first`."""

    table: Tensor
    total: int
    first: int
    window: int | None


class Kernels:
    """The functions of one library. Every one returns what the torch expression in its description returns."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes = arguments
            function.restype = _int if name.startswith("attend") else None

    def linear_float(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """F.linear(x, weight, bias)."""
        rows, (outputs, inputs) = len(x), weight.shape
        y = x.new_empty(rows, outputs)
        arguments = (x.data_ptr(), weight.data_ptr(), _address(bias), y.data_ptr(), rows, inputs, outputs)
        multiply = self._library.linear_float if rows <= FEW_ROWS else self._library.linear_many
        multiply(*arguments, torch.get_num_threads())
        return y

    def linear_stored(
        self, x: Tensor, packed: Tensor, scales: tuple[Tensor, Tensor | None], bias: Tensor | None, outputs: int
    ) -> Tensor:
        """F.linear(x, the floats that the file's weights stand for, bias)."""
        rows, inputs = x.shape
        y = x.new_empty(rows, outputs)
        pointers = (x.data_ptr(), packed.data_ptr(), scales[0].data_ptr(), _address(scales[1]), _address(bias), y.data_ptr())
        multiply = self._library.linear_stored if rows <= FEW_ROWS else self._library.linear_many_stored
        multiply(*pointers, rows, inputs, outputs, torch.get_num_threads())
        return y

    def linear_int8(self, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """F.linear(x, unpacked weight, bias), x rounded to 16 bits a group."""
        rows, inputs = x.shape
        y = x.new_empty(rows, outputs)
        pointers = (x.data_ptr(), packed.data_ptr(), scales.data_ptr(), _address(bias), y.data_ptr())
        self._library.linear_int8(*pointers, rows, inputs, outputs, torch.get_num_threads())
        return y

    def linear_int4(
        self, x: Tensor, packed: Tensor, scales: tuple[Tensor, Tensor], bias: Tensor | None, outputs: int
    ) -> Tensor:
        """The same for 4-bit weights; `scales`: what their steps are multiplied with, and what is added then."""
        rows, inputs = x.shape
        y = x.new_empty(rows, outputs)
        pointers = (x.data_ptr(), packed.data_ptr(), scales[0].data_ptr(), scales[1].data_ptr(), _address(bias), y.data_ptr())
        self._library.linear_int4(*pointers, rows, inputs, outputs, torch.get_num_threads())
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """F.rms_norm over the last axis."""
        y = torch.empty_like(x)
        size = x.shape[-1]
        rows = x.numel() // size
        self._library.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, size, eps, torch.get_num_threads())
        return y

    def gate(self, gate_up: Tensor) -> Tensor:
        """F.silu(first half) * second half of every row."""
        rows, width = gate_up.shape
        y = gate_up.new_empty(rows, width // 2)
        self._library.gate(gate_up.data_ptr(), y.data_ptr(), rows, width // 2, torch.get_num_threads())
        return y

    def rotate_and_store(self, qkv: Tensor, angles: tuple[Tensor, Tensor], layer: Tensor, slots: Tensor, heads: int) -> None:
        """Turn the queries and keys of `qkv` in place, and put keys and values at `slots` of a layer's cache."""
        kv_heads, dim = layer.shape[-2:]
        self._library.rotate_and_store(
            *(qkv.data_ptr(), angles[0].data_ptr(), angles[1].data_ptr(), layer.data_ptr(), layer.dtype is torch.bfloat16),
            *(slots.data_ptr(), len(qkv), heads, kv_heads, dim, torch.get_num_threads()),
        )

    def attend_decode(
        self, queries: Tensor, layer: Tensor, seen: tuple[Tensor, Tensor, Tensor], scale: float, cap: float | None
    ) -> Tensor:
        """Attention of one query [heads, dim] a sequence. `seen`: block tables [sequences, blocks], the first token that each
        sequence sees, and how many it has; int64."""
        tables, first, lengths = seen
        sequences, heads, dim = queries.shape
        out = queries.new_empty(sequences, heads, dim)
        self._library.attend_decode(
            *(queries.data_ptr(), queries.stride(0), layer.data_ptr(), layer.dtype is torch.bfloat16),
            *(tables.data_ptr(), tables.shape[1], first.data_ptr(), lengths.data_ptr()),
            *(layer.shape[1], sequences, heads, layer.shape[3], dim),
            *(scale, cap or 0.0, out.data_ptr(), torch.get_num_threads()),
        )
        return out

    def attend_chunk(
        self, queries: Tensor, layer: Tensor, seen: Seen, softmax: tuple[float, float | None], out: Tensor, *, rounded: bool
    ) -> None:
        """Attention of the queries [tokens, heads, dim] of one sequence's last tokens, into `out` of the same shape. `softmax`:
        the logits' scale, and their cap or None. `rounded`: multiplied in 16 bits, which is half the work."""
        tokens, heads, dim = queries.shape
        self._library.attend_chunk(
            *(queries.data_ptr(), queries.stride(0), layer.data_ptr(), layer.dtype is torch.bfloat16, seen.table.data_ptr()),
            *(layer.shape[1], tokens, seen.total, seen.first, seen.window or seen.total, heads, layer.shape[3], dim),
            *(softmax[0], softmax[1] or 0.0, rounded, out.data_ptr(), torch.get_num_threads()),
        )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def kernels() -> Kernels | None:
    """The kernels of this machine, compiled if need be; None where they cannot be had."""
    try:
        return Kernels(build())
    except (BuildError, OSError) as error:
        logger.warning("no native kernels: %s; torch computes in their place, slower", error)
        return None


def usable(*tensors: Tensor) -> Kernels | None:
    """The kernels, if they take these tensors."""
    return kernels_for(*tensors) if all(tensor.is_contiguous() for tensor in tensors) else None


def kernels_for(*tensors: Tensor) -> Kernels | None:
    """The kernels, if they compute with such numbers, however they lie in memory."""
    takes = all(tensor.dtype is torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
    return kernels() if takes else None


def stores(layer: Tensor) -> bool:
    """Whether the kernels read and write such a layer of a cache."""
    on_cpu = layer.device.type == "cpu" and layer.is_contiguous()
    return on_cpu and layer.dtype in (torch.float32, torch.bfloat16) and layer.shape[-1] in HEAD_DIMS


def build(flags: Sequence[str] = FLAGS, compiler: str | None = None) -> Path:
    """The library's path; compiled if it is not in the cache. Raises `BuildError`."""
    found = compiler or os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found is None:
        raise BuildError("there is no C++ compiler (c++, g++ or clang++; or name it in CXX)")
    command = [found, *flags, *LINK]
    target = cache_root() / "kernels" / f"{_digest(command)}.so"
    with locked(target.with_name(f".{target.name}.lock")):
        if not target.is_file():
            with scratch_folder(target) as scratch:
                _compile([*command, "-o", str(scratch / target.name), *map(str, SOURCES)])
                (scratch / target.name).replace(target)
    return target


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")


def _digest(command: Sequence[str]) -> str:
    processor = Path("/proc/cpuinfo")
    features = {line for line in processor.read_text().splitlines() if line.startswith(("flags", "Features", "model name"))}
    parts = (*(path.read_text() for path in (*SOURCES, *HEADERS)), *command, platform.platform(), *sorted(features))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
