"""Grouped-query attention as latent attention: exact where nothing is dropped, and what it costs where something is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.convert_folder import Conversion, Wanted, convert_folder, smallest_within
from models.convert_mla import calibrate, convert_to_latent
from models.deepseek import Deepseek
from models.errors import ModelFileError
from models.folder import find_model
from models.hf_folder import load_weights
from models.llama import Llama
from models.load import LoadedModel, load_model
from models.pull import DEFAULT_MODEL
from models.quality import score_text
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


CALIBRATION = Path(__file__).parent.parent.parent / "conductor" / "DESIGN.md"
SAMPLE = Path(__file__).parent / "sample.txt"


@pytest.mark.slow
def test_what_the_default_model_pays_for_a_smaller_latent(default_model: LoadedModel) -> None:
    """Most of the rotation can go for nothing; the bytes cannot: without training, a third less ruins the model."""
    model, weights = load(DEFAULT_MODEL)
    calibration = calibrate(model, default_model.tokenizer.encode(CALIBRATION.read_text())[:1500])
    text = default_model.tokenizer.encode(SAMPLE.read_text())[:400]
    exact = score_text(model, text)
    rises = {}
    for rope_dim, rank in ((128, 256), (96, 160)):
        converted = convert_to_latent(model, weights, calibration, rank=rank, rope_dim=rope_dim)
        found = score_text(converted, text)
        rises[rope_dim, rank] = found.perplexity / exact.perplexity - 1
        print(f"rope {rope_dim}, rank {rank}: {converted.layout.bytes_per_token} B, perplexity {found.perplexity:.2f}")
    assert abs(rises[128, 256]) < 0.01
    assert 0.2 < rises[96, 160] < 1.0


TEXT = "the worker that holds a prefix answers first, and the worker that does not must wait for it or compute it again. " * 12


def convert_tiny(folder: Path, **wanted: Any) -> tuple[Conversion, Path]:
    write_tiny_folder(folder / "original", "llama", rope_parameters=SLOW_TURNS)
    target = folder / "converted"
    return convert_folder(str(folder / "original"), target, TEXT, Wanted(**wanted)), target


def test_a_converted_folder_is_the_converted_model(tmp_path: Path) -> None:
    """What is written loads like any folder, scores what was reported, keeps every promise, and says its true bytes."""
    done, target = convert_tiny(tmp_path, rope_dim=16, rank=20, tokens=400)
    loaded = load_model(str(target))
    assert isinstance(loaded.model, Deepseek)
    assert loaded.model.layout.bytes_per_token == done.converted_kv_bytes == loaded.card.kv_bytes_per_token == 3 * 36 * 4
    assert done.original_kv_bytes == 3 * 64 * 4
    text = loaded.tokenizer.encode(TEXT)[200:400]
    assert score_text(loaded.model, text).perplexity == pytest.approx(done.converted_perplexity, rel=1e-4)
    check_all(loaded.model)


def test_the_rank_is_the_smallest_within_the_loss_allowed(tmp_path: Path) -> None:
    """A generous bound takes the smallest rank, an impossible one the largest, and the figures tell which."""
    generous, _ = convert_tiny(tmp_path / "a", rope_dim=16, max_rise=1e9, tokens=400)
    strict, _ = convert_tiny(tmp_path / "b", rope_dim=16, max_rise=-1.0, tokens=400)
    assert (generous.rank, strict.rank) == (12, 48)
    assert strict.rise > -1.0


def test_the_search_for_a_rank_tries_a_few() -> None:
    tried: list[int] = []

    def holds(rank: int) -> bool:
        tried.append(rank)
        return rank >= 50

    assert smallest_within([10, 20, 30, 40, 50, 60, 70], holds) == 50
    assert len(tried) <= 3


def test_what_cannot_be_converted_is_refused_in_one_line(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path / "small", "llama")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("kept")
    with pytest.raises(ModelFileError, match="is not empty"):
        convert_folder(str(tmp_path / "small"), tmp_path / "full", TEXT, Wanted(16))
    with pytest.raises(ModelFileError, match="the text has 9 tokens; conversion needs 256"):
        convert_folder(str(tmp_path / "small"), tmp_path / "new", "too short", Wanted(16))
    _, converted = convert_tiny(tmp_path, rope_dim=16, rank=20, tokens=400)
    with pytest.raises(ModelFileError, match="ConvertedLatentForCausalLM; conversion is for the Llama family"):
        convert_folder(str(converted), tmp_path / "again", TEXT, Wanted(16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_frequencies": [1.0]}, "rope_frequencies is .*; it must be a list of 8 numbers"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
    ],
)
def test_a_damaged_configuration_is_named_by_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    _, target = convert_tiny(tmp_path, rope_dim=16, rank=20, tokens=400)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelFileError, match=message):
        load_model(str(target))
