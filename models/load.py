"""One call from the name or path of a model to a model that runs, its tokenizer and its card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from models.base import CausalLM
from models.deepseek import Deepseek
from models.deepseek_config import DeepseekConfig
from models.errors import ModelFileError
from models.families import DecoderConfig
from models.folder import ModelCard, ModelFolder, find_model, model_card
from models.hf_folder import load_stored, load_weights
from models.linear import WEIGHT_FORMATS
from models.llama import Llama
from models.projected import Projected
from models.projected_config import ProjectedConfig
from models.pull import DEFAULT_MODEL
from models.stages import WHOLE, Share
from models.tokenizer import TextTokenizer, load_tokenizer_folder
from models.weights import in_layers

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: CausalLM
    tokenizer: TextTokenizer
    card: ModelCard


def load_model(
    name_or_path: str = DEFAULT_MODEL,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    kv_dtype: str = "float32",
    weight_format: str = "full",
    share: Share = WHOLE,
) -> LoadedModel:
    """Load a model, or a share of its layers. Dtypes are named: float32, bfloat16, float16; weights stay as they are in full,
    or become int8 or int4, which is for float32 on the CPU. Raises `ModelError` with one line for people."""
    _check_weight_format(weight_format, device, dtype)
    folder = find_model(name_or_path)
    tokenizer = load_tokenizer_folder(folder.path)
    card = model_card(folder, tokenizer, kv_dtype, weight_format)
    as_stored = (device, dtype, weight_format) == ("cpu", "float32", "full")
    load = partial(_load, folder, torch.device(device), _torch_dtype("dtype", dtype), as_stored)
    model = _build(folder.config, load, _torch_dtype("kv_dtype", kv_dtype), weight_format, share)
    return LoadedModel(model, tokenizer, card)


def _load(
    folder: ModelFolder,
    device: torch.device,
    dtype: torch.dtype,
    as_stored: bool,
    wanted: Callable[[str], bool] = lambda name: True,
) -> dict[str, Tensor]:
    """Fused tensors, and if `as_stored` what some of them are decoded from as they are multiplied with."""
    weights = load_weights(folder, device, dtype, wanted)
    return weights | load_stored(folder, wanted) if as_stored else weights


def _build(
    config: DecoderConfig,
    load: Callable[..., dict[str, Tensor]],
    kv_dtype: torch.dtype,
    weight_format: str,
    share: Share,
) -> CausalLM:
    share.check(config)
    if isinstance(config, DeepseekConfig):
        return Deepseek(config, load(), kv_dtype, weight_format=weight_format)
    if isinstance(config, ProjectedConfig):
        return Projected(config, load(), kv_dtype, weight_format)
    layers = share.layers(config.num_layers)
    weights = load(lambda name: in_layers(config, name, layers))
    return Llama(config, weights, kv_dtype, weight_format, layers)


def _check_weight_format(weight_format: str, device: str, dtype: str) -> None:
    if weight_format not in WEIGHT_FORMATS:
        raise ModelFileError(f"weights is {weight_format!r}; allowed: {', '.join(WEIGHT_FORMATS)}")
    if weight_format != "full" and (device, dtype) != ("cpu", "float32"):
        raise ModelFileError(
            f"weights is {weight_format!r} with device {device!r} and dtype {dtype!r}; allowed: cpu and float32"
        )


def _torch_dtype(field: str, name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ModelFileError(f"{field} is {name!r}; allowed: {', '.join(_DTYPES)}")
    return _DTYPES[name]
