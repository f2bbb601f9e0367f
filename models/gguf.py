"""GGUF files: metadata, tensors and tokenizer, turned once into a prepared folder that everything else reads.

The folder holds what a Hugging Face folder holds (config.json, tokenizer.json, tokenizer_config.json, generation_config.json)
and the dequantised weights, fused, as one safetensors file; those of a form that the native kernels decode, a second time in
that form (`stored_weights`). GGUF stores q and k of the llama architecture for rotary over interleaved pairs; they are put back
into halves here. Parsing and dequantising are the `gguf` package's. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

from models.cache import write_json
from models.config import ModelConfig, config_from_gguf, config_to_hf
from models.errors import ModelFileError
from models.gguf_tokenizer import write_tokenizer
from models.stored_weights import STORED_WEIGHTS, stored_tensors
from models.weights import EMBED, HEAD, fused_tensors, layer_parts

_Number = TypeVar("_Number", np.float32, np.uint8)

FUSED_WEIGHTS = "fused.safetensors"
PREPARED_VERSION = 2
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GGUFFile:
    """One open GGUF file. `metadata` holds its plain values, `config` what it describes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
            self.metadata: Mapping[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except FileNotFoundError as error:
            raise ModelFileError(f"{path} is missing") from error
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ModelFileError(f"{path} is not a readable GGUF file: {error}") from error
        if "tokenizer.ggml.tokens" not in self.metadata:
            raise ModelFileError(f"{path}: tokenizer.ggml.tokens is missing")
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._refuse_rope_factors()
        self.config: ModelConfig = config_from_gguf(
            self.metadata, str(path), tied_embeddings="output.weight" not in self._tensors
        )

    def _refuse_rope_factors(self) -> None:
        if "rope_freqs.weight" in self._tensors:
            raise ModelFileError(f"{self.path}: rope_freqs.weight is not supported; use the Hugging Face folder of this model")

    def tensor(self, hf_name: str) -> NDArray[np.float32]:
        """A tensor by its Hugging Face name, as float32."""
        tensor = self._tensor(hf_name)
        try:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except (NotImplementedError, ValueError) as error:
            raise ModelFileError(f"{self.path}: tensor {tensor.name} of type {tensor.tensor_type.name}: {error}") from error
        return self._halves(hf_name, values)

    def stored(self, hf_name: str) -> tuple[gguf.GGMLQuantizationType, NDArray[np.uint8]]:
        """The type of a tensor, and the bytes of its rows."""
        tensor = self._tensor(hf_name)
        return tensor.tensor_type, self._halves(hf_name, tensor.data.view(np.uint8))

    def _tensor(self, hf_name: str) -> gguf.ReaderTensor:
        name = _gguf_name(hf_name)
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{self.path}: tensor {name} is missing")
        return tensor

    def _halves(self, hf_name: str, values: NDArray[_Number]) -> NDArray[_Number]:
        if self.metadata["general.architecture"] != "llama" or not hf_name.endswith(("q_proj.weight", "k_proj.weight")):
            return values
        rows, columns = values.shape
        pairs = values.reshape(rows // self.config.head_dim, self.config.head_dim // 2, 2, columns)
        return pairs.swapaxes(1, 2).reshape(rows, columns)


def _gguf_name(hf_name: str) -> str:
    stem, kind = hf_name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def prepare_gguf(path: Path, folder: Path) -> None:
    """Write the prepared form of the GGUF file `path` into the empty `folder`."""
    source = GGUFFile(path)
    write_json(folder / "config.json", config_to_hf(source.config))
    write_tokenizer(source.metadata, str(path), folder)
    fused = dict(fused_tensors(source.config, source.tensor, np.concatenate))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in fused.items()}, folder / FUSED_WEIGHTS)
    save_file(_stored(source), folder / STORED_WEIGHTS)


def _stored(source: GGUFFile) -> dict[str, NDArray[np.generic]]:
    """Every fused matrix of a form that the kernels decode."""
    parts = layer_parts(source.config) | {EMBED: ["model.embed_tokens.weight"]}
    if not source.config.tied_embeddings:
        parts[HEAD] = ["lm_head.weight"]
    stored: dict[str, NDArray[np.generic]] = {}
    for name, of in parts.items():
        if not name.endswith(("norm.weight", "bias")):
            stored |= stored_tensors(name, [source.stored(part) for part in of])
    return stored
