"""Weights from disk: a prepared folder's fused file, memory-mapped as it is, or a Hugging Face folder's shards, fused on load.

Every tensor's presence and shape is checked before the model is built, so that a truncated or foreign file gives one clear
error instead of a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.cache import read_json
from models.deepseek_config import DeepseekConfig
from models.deepseek_weights import deepseek_shapes, deepseek_tensors
from models.errors import ModelFileError
from models.families import DecoderConfig
from models.folder import ModelFolder
from models.gguf import FUSED_WEIGHTS
from models.projected_config import ProjectedConfig, projected_shapes
from models.stored_weights import STORED_WEIGHTS
from models.weights import fused_tensors, tensor_shapes


class _Shards:
    """Tensors by name over the safetensors files of one folder, opened lazily and memory-mapped."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self._folder = folder
        self._files = files
        self._open: dict[str, Any] = {}

    def get(self, name: str) -> Tensor:
        if name not in self._files:
            raise ModelFileError(f"{self._folder}: tensor {name} is missing")
        file = self._files[name]
        if file not in self._open:
            self._open[file] = _open(self._folder / file)
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor


def load_weights(
    folder: ModelFolder, device: torch.device, dtype: torch.dtype, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """The `wanted` fused tensors on `device`; on the CPU and in the file's own dtype they stay mapped to the file."""
    weights = dict(_fused_file(folder.path / FUSED_WEIGHTS) if folder.fused else _from_shards(folder, dtype))
    _check_shapes(folder.path, folder.config, weights)
    return {name: tensor.to(device=device, dtype=dtype) for name, tensor in weights.items() if wanted(name)}


def load_stored(folder: ModelFolder, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """What holds the `wanted` fused tensors in few bits (`stored_weights`), mapped to its file; nothing where there is none."""
    stored = _fused_file(folder.path / STORED_WEIGHTS) if folder.fused else iter(())
    return {name: tensor for name, tensor in stored if wanted(name.rpartition(".")[0])}


def _fused_file(path: Path) -> Iterator[tuple[str, Tensor]]:
    opened = _open(path)
    for name in opened.keys():  # noqa: SIM118 - not a mapping
        yield name, opened.get_tensor(name)


def _from_shards(folder: ModelFolder, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    shards = _Shards(folder.path, _shard_index(folder.path))
    for name, tensor in _fused(folder.config, shards.get):
        yield name, tensor.to(dtype)


def _fused(config: DecoderConfig, get: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(config, DeepseekConfig):
        return deepseek_tensors(config, get)
    if isinstance(config, ProjectedConfig):
        return ((name, get(name)) for name in projected_shapes(config))
    return fused_tensors(config, get, torch.cat)


def _shard_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise ModelFileError(f"{index}: weight_map is missing")
        return names
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelFileError(f"{path} holds no .safetensors file")
    return {name: file.name for file in files for name in _open(file).keys()}  # noqa: SIM118


def _open(path: Path) -> Any:  # safe_open has no types
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} is missing") from error
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path} is damaged: {error}") from error


def _check_shapes(path: Path, config: DecoderConfig, weights: dict[str, Tensor]) -> None:
    for name, expected in _shapes(config).items():
        if name not in weights:
            raise ModelFileError(f"{path}: tensor {name} is missing")
        found = tuple(weights[name].shape)
        if found != expected:
            raise ModelFileError(f"{path}: tensor {name} has shape {found}; config.json asks for {expected}")


def _shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Fused name -> the shape it must have."""
    if isinstance(config, DeepseekConfig):
        return deepseek_shapes(config)
    return projected_shapes(config) if isinstance(config, ProjectedConfig) else tensor_shapes(config)
