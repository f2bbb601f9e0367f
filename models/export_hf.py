"""Our weights as a Hugging Face folder, so that other engines and reference implementations compute with the same numbers."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.cache import write_json
from models.config import ModelConfig, config_to_hf
from models.errors import ModelFileError
from models.folder import find_model
from models.hf_folder import load_weights
from models.weights import split_tensors

_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def export_model(name_or_path: str, target: Path) -> None:
    """Write the named model, weights as float32 and tokenizer, into the folder `target`."""
    folder = find_model(name_or_path)
    if not isinstance(folder.config, ModelConfig) or folder.config.gemma is not None:
        raise ModelFileError(f"{name_or_path} is a {folder.config.architecture}; export writes the Llama family only")
    export_weights(folder.config, load_weights(folder, torch.device("cpu"), torch.float32), target)
    for name in _TEXT_FILES:
        if (folder.path / name).is_file():
            shutil.copyfile(folder.path / name, target / name)


def export_weights(config: ModelConfig, fused: Mapping[str, Tensor], target: Path) -> None:
    """Write config.json and model.safetensors of fused weights into the folder `target`."""
    target.mkdir(parents=True, exist_ok=True)
    write_json(target / "config.json", config_to_hf(config))
    tensors = {name: tensor.contiguous() for name, tensor in split_tensors(config, dict(fused)).items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
