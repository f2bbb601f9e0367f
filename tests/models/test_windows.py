"""Sliding-window layers: equal to transformers, counted apart, and rebuilt by bounded replay with a known error."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import config_from_hf, config_to_hf
from models.errors import ModelFileError
from models.families import config_of_folder
from models.folder import find_model
from models.kv_layout import number_format, state_bytes
from models.load import LoadedModel, load_model
from models.window_state import Recompute, plan_recompute
from tests.models.builders import new_cache, run, write_tiny_folder
from tests.models.contract import check_all, check_approximate_replay, check_exact_replay, tokens

WINDOW = 20
SHORT: dict[str, Any] = {"sliding_window": WINDOW, "head_dim": 16}
GEMMA: dict[str, Any] = {**SHORT, "query_pre_attn_scalar": 24, "num_hidden_layers": 4}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", SHORT),
    "mistral-one-token": ("mistral", {**SHORT, "sliding_window": 1}),
    "mistral-wider-than-text": ("mistral", {**SHORT, "sliding_window": 200}),
    "qwen2-upper-layers": ("qwen2", {**SHORT, "head_dim": None, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3-listed-layers": ("qwen3", {**SHORT, "use_sliding_window": True, "layer_types": MIXED}),
    "gemma2": ("gemma2", GEMMA),
    "gemma2-tight-caps": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7}),
    "gemma3-scaled": ("gemma3_text", {**GEMMA, "layer_types": [*MIXED, "full_attention"], "rope_parameters": GEMMA3_ROPES}),
}


def write_windowed(folder: Path, name: str) -> Any:
    kind, changes = FAMILIES[name]
    return write_tiny_folder(folder, kind, **{key: value for key, value in changes.items() if value is not None})


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    reference = write_windowed(folder, request.param)
    return load_model(str(folder)), reference


@torch.inference_mode()
def test_every_family_computes_what_transformers_computes(family: tuple[LoadedModel, Any]) -> None:
    """Prompts longer than the window give the reference's logits, from one-shot and from chunked prefill."""
    loaded, reference = family
    prompt = tokens(90)
    expected = reference(torch.tensor([prompt])).logits[0, -1]
    cache = new_cache(loaded.model)
    torch.testing.assert_close(run(loaded.model, cache, prompt, range(6)), expected, atol=2e-4, rtol=2e-4)
    run(loaded.model, cache, prompt[:37], range(8, 14))
    chunked = run(loaded.model, cache, prompt[37:], range(8, 14), context=37)
    torch.testing.assert_close(chunked, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["mistral", "qwen2-upper-layers", "qwen3-listed-layers", "gemma2", "gemma3"])
def test_logits_do_not_depend_on_how_the_work_is_done(tmp_path: Path, name: str) -> None:
    """Chunks, batches, reused prefixes and hand-overs leave the logits as they were."""
    write_windowed(tmp_path, name)
    check_all(load_model(str(tmp_path)).model)


def test_state_that_a_window_has_left_behind_is_not_read(tmp_path: Path) -> None:
    """Where all layers have a window, blocks before it may be overwritten: nothing changes."""
    write_windowed(tmp_path, "mistral")
    model = load_model(str(tmp_path)).model
    prompt, cache = tokens(90), new_cache(model)
    run(model, cache, prompt[:80], range(6))
    for layer in cache.layers:
        layer[:3] = float("nan")
    expected = run(model, new_cache(model), prompt, range(6))
    torch.testing.assert_close(run(model, cache, prompt[80:], range(6), context=80), expected, atol=1e-4, rtol=1e-4)


def test_window_state_is_counted_apart_from_global_state(tmp_path: Path) -> None:
    """What a shared tier keeps of a Gemma-like model is its global layers' KV; the rest is bounded by the window."""
    write_windowed(tmp_path, "gemma2")
    config = find_model(str(tmp_path)).config
    found = state_bytes(config.kv_states(number_format("fp32")))
    one_layer = 2 * 2 * 16 * 4
    assert found.global_per_token == Fraction(2 * one_layer)
    assert found.window_bytes == 2 * one_layer * WINDOW


# --- what is computed after a hit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("global_hit", "window_hit", "expected"),
    [
        pytest.param(0, False, Recompute(range(0), range(1000)), id="global miss: everything"),
        pytest.param(640, True, Recompute(range(640, 640), range(640, 1000)), id="both hit: the suffix"),
        pytest.param(640, False, Recompute(range(512, 640), range(640, 1000)), id="window miss: W tokens again"),
        pytest.param(64, False, Recompute(range(64), range(64, 1000)), id="prefix shorter than the window: all of it again"),
        pytest.param(1000, False, Recompute(range(871, 999), range(999, 1000)), id="whole prompt: its last token is computed"),
    ],
)
def test_the_hit_table_of_global_and_window_state(global_hit: int, window_hit: bool, expected: Recompute) -> None:
    found = plan_recompute(1000, global_hit_tokens=global_hit, window_hit=window_hit, window_tokens=128)
    assert found == expected


def test_a_hit_longer_than_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="global_hit_tokens is 11; allowed: 0 to the prompt's 10 tokens"):
        plan_recompute(10, global_hit_tokens=11, window_hit=True, window_tokens=4)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "qwen3-listed-layers"])
def test_replaying_a_window_for_each_layer_is_exact(tmp_path: Path, name: str) -> None:
    write_windowed(tmp_path, name)
    check_exact_replay(load_model(str(tmp_path)).model, WINDOW)


@pytest.mark.parametrize("name", ["gemma2", "qwen3-listed-layers"])
def test_replaying_one_window_approximates_and_leaves_global_state_alone(tmp_path: Path, name: str) -> None:
    write_windowed(tmp_path, name)
    check_approximate_replay(load_model(str(tmp_path)).model, WINDOW)


# --- configurations ------------------------------------------------------------------------------------------------------


BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "sliding_window": 32,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"]}, (32, 32, 32)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, ()),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}, ()),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 2}, (None, None, 32)),
        ({"architectures": ["Gemma2ForCausalLM"]}, (32, None, 32)),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 3}, (32, 32, None)),
    ],
)
def test_which_layers_have_a_window(changes: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    config = config_of_folder({**BASE, **changes}, "config.json")
    assert config.layer_windows == expected  # type: ignore[union-attr]


def test_windows_survive_export() -> None:
    config = config_from_hf({**BASE, "architectures": ["MistralForCausalLM"]})
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'; allowed: gelu_pytorch_tanh"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True; allowed: False"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*; allowed: 3 of sliding_attention, full_attention"),
        ({"layer_types": ["a", "b", "c"]}, "layer_types is "),
        ({"sliding_window": 0}, "sliding_window is 0; allowed: a positive integer"),
    ],
)
def test_a_gemma_that_we_cannot_compute_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        config_of_folder({**BASE, "architectures": ["Gemma2ForCausalLM"], **changes}, "config.json")
