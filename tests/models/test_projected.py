"""Global KV projected from an encoder's output: computed as described, counted exactly, and held to what every family owes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.base import CausalLM, ForwardBatch
from models.errors import ModelFileError
from models.families import config_of_folder
from models.folder import find_model
from models.kv_layout import grouped_query, number_format, state_bytes
from models.load import load_model
from models.projected import Projected
from models.projected_config import ProjectedConfig
from models.stages import Share
from tests.models.builders import LLAMA3_ROPE, TINY_PROJECTED, new_cache, run, write_projected_folder
from tests.models.contract import check_all, check_approximate_replay, check_exact_replay, tokens

WINDOW = int(TINY_PROJECTED["sliding_window"])
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-layer-each": {"num_encoder_layers": 1, "num_decoder_layers": 1},
    "tied-and-ungrouped": {"tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 500.0},
    "window-of-one": {"sliding_window": 1},
    "window-wider-than-text": {"sliding_window": 200},
}


@pytest.fixture
def model(tmp_path: Path) -> CausalLM:
    write_projected_folder(tmp_path)
    return load_model(str(tmp_path)).model


class Reference:
    """The same model over a whole prompt at once, without a cache, with keys and masks written out."""

    def __init__(self, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.encoder, self.decoder = values["num_encoder_layers"], values["num_decoder_layers"]
        self.heads, self.kv_heads, self.dim = values["num_attention_heads"], values["num_key_value_heads"], values["head_dim"]
        self.window, self.theta = values["sliding_window"], values.get("rope_theta", 10000.0)
        self.head = weights["embed.weight" if values.get("tie_word_embeddings") else "head.weight"]

    def logits(self, prompt: list[int]) -> Tensor:
        hidden, source = self.weights["embed.weight"][torch.tensor(prompt)], None
        for index in range(self.encoder + self.decoder):
            if index == self.encoder:
                source = self.norm(hidden, "source_norm.weight") @ self.weights["source_kv.weight"].T
            hidden = self.layer(hidden, f"layers.{index}.", source)
        return self.norm(hidden, "norm.weight") @ self.head.T

    def layer(self, hidden: Tensor, prefix: str, source: Tensor | None) -> Tensor:
        queries = self.heads * self.dim
        normed = self.norm(hidden, prefix + "attention_norm.weight")
        qkv = normed @ self.weights[prefix + "qkv.weight"].T
        seen = self.attend(qkv[:, :queries], qkv[:, queries:], self.window)
        if source is not None:
            asked = normed @ self.weights[prefix + "global_query.weight"].T
            seen = torch.cat((seen, self.attend(asked, source, len(hidden))), dim=1)
        hidden = hidden + seen @ self.weights[prefix + "output.weight"].T
        gate, up = (self.norm(hidden, prefix + "feed_forward_norm.weight") @ self.weights[prefix + "gate_up.weight"].T).chunk(
            2, 1
        )
        return hidden + (F.silu(gate) * up) @ self.weights[prefix + "down.weight"].T

    def attend(self, queries: Tensor, keys_values: Tensor, window: int) -> Tensor:
        keys, values = (part.view(len(part), self.kv_heads, self.dim) for part in keys_values.chunk(2, dim=1))
        share = self.heads // self.kv_heads
        keys, values = self.turn(keys).repeat_interleave(share, 1), values.repeat_interleave(share, 1)
        logits = torch.einsum("qhd,khd->hqk", self.turn(queries.view(-1, self.heads, self.dim)), keys) / self.dim**0.5
        back = torch.arange(len(queries))[:, None] - torch.arange(len(queries))
        weights = logits.masked_fill((back < 0) | (back >= window), float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)

    def turn(self, heads: Tensor) -> Tensor:
        pairs = torch.view_as_complex(torch.stack(heads.chunk(2, dim=-1), dim=-1))
        steps = self.theta ** (-torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.arange(len(heads))[:, None, None] * steps
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), dim=-1)

    def norm(self, hidden: Tensor, name: str) -> Tensor:
        return hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.weights[name]


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_logits_are_those_of_the_model_written_out_plainly(tmp_path: Path, changes: dict[str, Any]) -> None:
    """All logits of a prompt longer than the window, and those of its last token alone, from one-shot and chunked prefill."""
    weights = write_projected_folder(tmp_path, **changes)
    model, prompt = load_model(str(tmp_path)).model, tokens(90)
    expected = Reference({**TINY_PROJECTED, **changes}, weights).logits(prompt)
    cache = new_cache(model)
    batch = ForwardBatch(torch.tensor(prompt), [90], [0], [range(6)], all_logits=True)
    torch.testing.assert_close(model.forward(batch, cache), expected, atol=2e-4, rtol=2e-4)
    run(model, cache, prompt[:37], range(8, 14))
    chunked = run(model, cache, prompt[37:], range(8, 14), context=37)
    torch.testing.assert_close(chunked, expected[-1], atol=2e-4, rtol=2e-4)


def test_logits_do_not_depend_on_how_the_work_is_done(model: CausalLM) -> None:
    """Chunks, batches, reused prefixes and hand-overs leave the logits as they were."""
    check_all(model)


@pytest.mark.parametrize("name", ["one-layer-each", "tied-and-ungrouped", "window-of-one"])
def test_other_shapes_owe_the_same(tmp_path: Path, name: str) -> None:
    write_projected_folder(tmp_path, rope_scaling=LLAMA3_ROPE, **SHAPES[name])
    check_all(load_model(str(tmp_path)).model)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_weights_compute_nearly_the_same(tmp_path: Path, weights: str) -> None:
    write_projected_folder(tmp_path)
    exact, rounded = (load_model(str(tmp_path), weight_format=kind).model for kind in ("full", weights))
    expected, found = (run(model, new_cache(model), tokens(40), range(3)) for model in (exact, rounded))
    assert 0 < float((found - expected).norm() / expected.norm()) < {"int8": 0.05, "int4": 0.5}[weights]


# --- what is cached ------------------------------------------------------------------------------------------------------


def test_the_cache_takes_the_bytes_that_are_counted(tmp_path: Path) -> None:
    """One layer's global KV a token, however many read it; windows apart; and the paged pool holds just that."""
    write_projected_folder(tmp_path)
    config, loaded = find_model(str(tmp_path)).config, load_model(str(tmp_path), kv_dtype="bfloat16")
    kept_as = number_format("bf16")
    states, one_layer = config.kv_states(kept_as), 2 * 2 * 16 * 2
    assert state_bytes(states).global_per_token == one_layer
    assert state_bytes(states).window_bytes == 5 * one_layer * WINDOW
    assert grouped_query(5, 2, 16, kept_as).bytes_per_token == 5 * one_layer  # were the layers a plain decoder's
    cache = new_cache(loaded.model, blocks=7)
    assert sum(layer.nbytes for layer in cache.layers) == 7 * 16 * sum(state.bytes_per_token for state in states)
    assert loaded.card.kv_bytes_per_token == loaded.model.layout.bytes_per_token == 6 * one_layer


def test_global_state_is_made_by_the_encoder_alone_and_before_the_decoder_begins(tmp_path: Path) -> None:
    """With other weights in the decoder the same source is written; it is announced between the two stacks."""
    weights = write_projected_folder(tmp_path)
    other = {
        name: tensor + 0.1 if name.startswith(("layers.2", "layers.3", "layers.4")) else tensor
        for name, tensor in weights.items()
    }
    config = find_model(str(tmp_path)).config
    assert isinstance(config, ProjectedConfig)
    announced: list[int] = []
    found = []
    for tensors in (weights, other):
        model = Projected(config, tensors)
        cache = new_cache(model)
        model.forward(ForwardBatch(torch.tensor(tokens(40)), [40], [0], [range(3)]), cache, on_layer=announced.append)
        found.append(cache.layers)
    same = [torch.equal(one, two) for one, two in zip(*found, strict=True)]
    assert same == [True, True, True, False, False, False]
    assert announced == [*range(6), *range(6)]


def test_the_decoder_sees_beyond_its_windows_through_global_state_alone(model: CausalLM) -> None:
    """Window state that was left behind may be lost; global state of the same tokens may not."""
    prompt = tokens(90)
    exact = run(model, new_cache(model), prompt, range(6))

    def after_losing(layers: list[int]) -> Tensor:
        cache = new_cache(model)
        run(model, cache, prompt[:80], range(6))
        for index in layers:
            cache.layers[index][:3] = 7.0
        return run(model, cache, prompt[80:], range(6), context=80)

    torch.testing.assert_close(after_losing([0, 1, 3, 4, 5]), exact, atol=1e-4, rtol=1e-4)
    assert float((after_losing([2]) - exact).norm() / exact.norm()) > 0.05


@pytest.mark.parametrize("check", [check_exact_replay, check_approximate_replay])
def test_window_state_of_both_stacks_is_rebuilt_by_replay(tmp_path: Path, check: Callable[[CausalLM, int], None]) -> None:
    """Exactly by a window for each layer, of either stack; nearly by one; and the source is left alone."""
    write_projected_folder(tmp_path, num_encoder_layers=1, num_decoder_layers=2)
    check(load_model(str(tmp_path)).model, WINDOW)


# --- folders -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_encoder_layers": None}, "num_encoder_layers is missing; allowed: a positive integer"),
        ({"num_decoder_layers": 0}, "num_decoder_layers is 0; allowed: a positive integer"),
        ({"sliding_window": None}, "sliding_window is missing; allowed: a positive integer"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: silu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}; allowed: null"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4; it must be a multiple of num_key_value_heads"),
        ({"head_dim": 15}, "head_dim is 15; rotary embedding needs an even number"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type is 'dynamic'; allowed: default, linear, llama3, yarn"),
    ],
)
def test_a_shape_that_we_cannot_compute_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        config_of_folder({**TINY_PROJECTED, **changes}, "config.json")


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    write_projected_folder(tmp_path)
    config = (tmp_path / "config.json").read_text().replace('"num_decoder_layers": 3', '"num_decoder_layers": 4')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelFileError, match=r"tensor layers.5.attention_norm.weight is missing"):
        load_model(str(tmp_path))


def test_its_layers_are_not_shared_out(tmp_path: Path) -> None:
    write_projected_folder(tmp_path)
    with pytest.raises(
        ModelFileError, match="stages is 2; allowed: 1 for a model with latent attention, experts or an encoder"
    ):
        load_model(str(tmp_path), share=Share(0, 2))
