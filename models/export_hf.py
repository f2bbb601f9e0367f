"""Our weights as a Hugging Face folder, so that other engines and reference implementations compute with the same numbers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.cache import write_json
from models.config import ModelConfig, config_to_hf
from models.deepseek_config import DeepseekConfig
from models.errors import ModelFileError
from models.folder import find_model
from models.hf_folder import load_weights
from models.latent_config import latent_to_hf
from models.weights import EMBED, FINAL_NORM, HEAD, split_tensors

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def export_model(name_or_path: str, target: Path) -> None:
    """Write the named model, weights as float32 and tokenizer, into the folder `target`."""
    folder = find_model(name_or_path)
    if not isinstance(folder.config, ModelConfig) or folder.config.gemma is not None:
        raise ModelFileError(f"{name_or_path} is a {folder.config.architecture}; export writes the Llama family only")
    export_weights(folder.config, load_weights(folder, torch.device("cpu"), torch.float32), target)
    for name in TEXT_FILES:
        if (folder.path / name).is_file():
            shutil.copyfile(folder.path / name, target / name)


def export_weights(config: ModelConfig, fused: Mapping[str, Tensor], target: Path) -> None:
    """Write config.json and model.safetensors of fused weights into the folder `target`."""
    target.mkdir(parents=True, exist_ok=True)
    write_json(target / "config.json", config_to_hf(config))
    tensors = {name: tensor.contiguous() for name, tensor in split_tensors(config, dict(fused)).items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def export_latent(config: DeepseekConfig, fused: Mapping[str, Tensor], target: Path) -> None:
    """Write config.json and model.safetensors of a model converted to latent attention into the folder `target`."""
    target.mkdir(parents=True, exist_ok=True)
    write_json(target / "config.json", latent_to_hf(config))
    tensors = {name: tensor.contiguous() for name, tensor in _latent_tensors(config, fused)}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _latent_tensors(config: DeepseekConfig, fused: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """By DeepSeek's names; the inverse of `deepseek_tensors`."""
    yield "model.embed_tokens.weight", fused[EMBED]
    yield "model.norm.weight", fused[FINAL_NORM]
    if not config.tied_embeddings:
        yield "lm_head.weight", fused[HEAD]
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        queries, latents = fused[ours + "query_kv_a.weight"].tensor_split((config.num_heads * config.query_dim,))
        gate, up = fused[ours + "gate_up.weight"].chunk(2)
        yield theirs + "input_layernorm.weight", fused[ours + "attention_norm.weight"]
        yield theirs + "post_attention_layernorm.weight", fused[ours + "feed_forward_norm.weight"]
        yield theirs + "self_attn.q_proj.weight", queries
        yield theirs + "self_attn.kv_a_proj_with_mqa.weight", latents
        yield theirs + "self_attn.kv_b_proj.weight", fused[ours + "kv_b.weight"]
        yield theirs + "self_attn.o_proj.weight", fused[ours + "output.weight"]
        yield theirs + "mlp.gate_proj.weight", gate
        yield theirs + "mlp.up_proj.weight", up
        yield theirs + "mlp.down_proj.weight", fused[ours + "down.weight"]
