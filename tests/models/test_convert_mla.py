"""Grouped-query attention as latent attention: exact where nothing is dropped, and what it costs where something is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.convert_mla import calibrate, convert_to_latent
from models.deepseek import Deepseek
from models.errors import ModelFileError
from models.folder import find_model
from models.hf_folder import load_weights
from models.llama import Llama
from models.load import load_model
from tests.models.builders import new_cache, run, write_tiny_folder
from tests.models.contract import check_all, tokens

SLOW_TURNS = {"rope_type": "default", "rope_theta": 1e8}  # the last frequencies hardly turn within a test's context


def load(name: str) -> tuple[Llama, dict[str, Tensor]]:
    model = load_model(name).model
    assert isinstance(model, Llama)
    return model, load_weights(find_model(name), torch.device("cpu"), torch.float32)


def convert(folder: Path, rank: int, rope_dim: int, **changes: Any) -> tuple[Llama, Deepseek]:
    write_tiny_folder(folder, "llama", rope_parameters=SLOW_TURNS, **changes)
    model, weights = load(str(folder))
    calibration = calibrate(model, tokens(200, seed=5))
    return model, convert_to_latent(model, weights, calibration, rank=rank, rope_dim=rope_dim)


def test_calibration_undoes_the_rotation_of_cached_keys(tmp_path: Path) -> None:
    """Keys of the first layer come out as the projection of the normed embeddings, whatever their position."""
    write_tiny_folder(tmp_path, "llama")
    model, _ = load(str(tmp_path))
    found = calibrate(model, [7] * 100)
    assert found.keys.shape == (3, 100, 2, 16)
    torch.testing.assert_close(found.keys[0], found.keys[0, :1].expand(100, -1, -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_conversion_that_drops_nothing_is_exact(tmp_path: Path, tied: bool) -> None:
    """With all turning pairs kept rotary and a latent of full rank, the logits are those of the original."""
    model, converted = convert(tmp_path, rank=34, rope_dim=30, tie_word_embeddings=tied)
    prompt = tokens(90)
    expected = run(model, new_cache(model), prompt, range(6))
    torch.testing.assert_close(run(converted, new_cache(converted), prompt, range(6)), expected, atol=2e-3, rtol=2e-3)


def test_a_smaller_latent_loses_more(tmp_path: Path) -> None:
    """Error grows as the rank falls; so do the bytes saved."""
    prompt, errors, sizes = tokens(90), [], []
    for rank in (34, 24, 12):
        model, converted = convert(tmp_path / str(rank), rank=rank, rope_dim=30)
        expected = run(model, new_cache(model), prompt, range(6))
        errors.append(float((run(converted, new_cache(converted), prompt, range(6)) - expected).norm()))
        sizes.append(converted.layout.bytes_per_token)
    assert errors == sorted(errors)
    assert sizes == [3 * (30 + rank) * 4 for rank in (34, 24, 12)]


def test_a_converted_model_behaves_like_any_other(tmp_path: Path) -> None:
    """Chunks, batches, reused prefixes and hand-overs leave its logits as they were."""
    _, converted = convert(tmp_path, rank=20, rope_dim=16)
    check_all(converted)


@pytest.mark.parametrize(
    ("rank", "rope_dim", "message"),
    [
        (20, 7, "rope_dim is 7; allowed: an even number from 2 to 30"),
        (20, 32, "rope_dim is 32"),
        (60, 16, "rank is 60; allowed: 1 to 48"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, rank: int, rope_dim: int, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        convert(tmp_path, rank=rank, rope_dim=rope_dim)


def test_a_model_with_normed_keys_is_refused(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path, "qwen3", head_dim=16)
    model, weights = load(str(tmp_path))
    with pytest.raises(ModelFileError, match="Qwen3ForCausalLM has normed or biased keys"):
        convert_to_latent(model, weights, calibrate(model, tokens(20)), rank=8, rope_dim=8)
