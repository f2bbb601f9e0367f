"""Quantised GGUF tensors: read back within their format's error, in our layout, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from numpy.typing import NDArray

from models.errors import ModelFileError
from models.gguf import GGUFFile
from models.linear import Projections, StoredLinear
from models.stored_weights import stored_tensors

HIDDEN, FEED = 256, 256
TYPES = {
    "F16": 1e-3,
    "Q8_0": 0.01,
    "Q5_1": 0.04,
    "Q5_0": 0.06,
    "Q4_1": 0.08,
    "Q4_0": 0.12,
}


def write_gguf(path: Path, tensors: dict[str, tuple[NDArray[Any], gguf.GGMLQuantizationType]]) -> None:
    """A file of the llama architecture with the given raw tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b"])
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_weights(rows: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("name", TYPES)
def test_each_format_reads_back_within_its_error(tmp_path: Path, name: str) -> None:
    """Root mean square error relative to the weights' own size."""
    kind, weights = gguf.GGMLQuantizationType[name], random_weights(FEED)
    write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (quantize(weights, kind), kind)})
    found = GGUFFile(tmp_path / "m.gguf").tensor("model.layers.0.mlp.up_proj.weight")
    error = np.sqrt(np.mean((found - weights) ** 2) / np.mean(weights**2))
    assert (found.shape, found.dtype) == (weights.shape, np.float32)
    assert 0 < error < TYPES[name]


def q6_k_row(generator: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """A block of 256 weights as Q6_K bytes and as numbers: 6-bit values less 32, sixteen scales, one factor."""
    values = generator.integers(0, 64, 256)
    scales = generator.integers(-50, 50, 16).astype(np.int8)
    factor = np.float16(0.01)
    low, high = np.zeros(128, np.uint8), np.zeros(64, np.uint8)
    for place, value in enumerate(values):
        half, quarter, lane = place // 128, place % 128 // 32, place % 32
        low[half * 64 + quarter % 2 * 32 + lane] |= (value & 15) << (4 * (quarter // 2))
        high[half * 32 + lane] |= (value >> 4) << (2 * quarter)
    block = np.concatenate((low, high, scales.view(np.uint8), np.frombuffer(factor.tobytes(), np.uint8)))
    expected = np.float32(factor) * np.repeat(scales.astype(np.float32), 16) * (values - 32)
    return block, expected.astype(np.float32)


def test_q6_k_is_read_as_its_layout_says(tmp_path: Path) -> None:
    """The k-quant that mixed files use for their most sensitive tensors, against blocks packed by hand."""
    generator = np.random.default_rng(2)
    rows = [q6_k_row(generator) for _ in range(8)]
    packed, expected = (np.stack(part) for part in zip(*rows, strict=True))
    write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (packed, gguf.GGMLQuantizationType.Q6_K)})
    found = GGUFFile(tmp_path / "m.gguf").tensor("model.layers.0.mlp.up_proj.weight")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])
def test_quantised_keys_are_put_into_halves_like_plain_ones(tmp_path: Path, name: str) -> None:
    """Files of the llama architecture pair rotary rows (2i, 2i+1); whatever the format, we read them as (i, i + dim/2)."""
    kind, weights = gguf.GGMLQuantizationType[name], random_weights(128)
    write_gguf(tmp_path / "m.gguf", {"blk.0.attn_k.weight": (quantize(weights, kind), kind)})
    found = GGUFFile(tmp_path / "m.gguf").tensor("model.layers.0.self_attn.k_proj.weight")
    heads = weights.reshape(2, 64, HIDDEN)
    expected = np.concatenate((heads[:, ::2], heads[:, 1::2]), axis=1).reshape(128, HIDDEN)
    np.testing.assert_allclose(found, expected, atol=0.4)
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.99


def test_a_format_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_K
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.zeros((4, HIDDEN // block * size), np.uint8)
    write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (data, kind)})
    with pytest.raises(ModelFileError, match=r"tensor blk\.0\.ffn_up\.weight of type Q8_K"):
        GGUFFile(tmp_path / "m.gguf").tensor("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize(("kinds", "held"), [(("Q4_1",) * 3, True), (("Q8_0",) * 3, True), (("Q4_1", "Q4_1", "Q8_0"), False)])
def test_fused_weights_are_held_in_few_bits_where_their_parts_are_of_one_form(
    tmp_path: Path, kinds: tuple[str, ...], held: bool
) -> None:
    """Keys and queries in halves, like their floats; other weights are there as floats alone."""
    names = {"attn_q": 256, "attn_k": 128, "attn_v": 128}
    tensors = {}
    for seed, ((name, rows), kind) in enumerate(zip(names.items(), kinds, strict=True)):
        quantised = gguf.GGMLQuantizationType[kind]
        tensors[f"blk.0.{name}.weight"] = (quantize(random_weights(rows, seed), quantised), quantised)
    write_gguf(tmp_path / "m.gguf", tensors)
    source = GGUFFile(tmp_path / "m.gguf")
    parts = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    found = {name: torch.from_numpy(tensor) for name, tensor in stored_tensors("w", [source.stored(x) for x in parts]).items()}
    assert bool(found) is held
    if held:
        weight = torch.from_numpy(np.concatenate([source.tensor(x) for x in parts]))
        project = Projections({"w": weight, **found})("w")
        assert isinstance(project, StoredLinear)
        torch.testing.assert_close(project(torch.eye(HIDDEN)), weight.T, atol=0, rtol=0)
