"""DeepSeek-V2/V3: equal to transformers, both forms of latent attention equal, state small and movable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.deepseek import Deepseek
from models.deepseek_config import MoEConfig, Routing
from models.errors import ModelFileError
from models.export_hf import export_model
from models.families import config_of_folder
from models.folder import find_model
from models.hf_folder import load_weights
from models.latent_attention import Form, LatentShape
from models.linear import FloatLinear
from models.load import LoadedModel, load_model
from models.mixture import Gated, MixtureWeights, mixture, route
from tests.models.builders import new_cache, run, write_tiny_folder
from tests.models.contract import ROUNDED_CLOSE, check_all, tokens

SMALL: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
V2_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-greedy": ("deepseek_v2", {"topk_method": "greedy"}),
    "v2-groups": ("deepseek_v2", {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}),
    "v2-direct-queries": ("deepseek_v2", {"q_lora_rank": None, "n_shared_experts": 2}),
    "v2-dense": ("deepseek_v2", {"first_k_dense_replace": 3}),
    "v2-yarn": ("deepseek_v2", {"rope_parameters": V2_YARN}),
    "v2-biased": ("deepseek_v2", {"attention_bias": True, "q_lora_rank": None}),
    "v3": ("deepseek_v3", {}),
    "v3-unnormed-shares": ("deepseek_v3", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "v3-all-mixtures": ("deepseek_v3", {"first_k_dense_replace": 0}),
    "v3-halves": ("deepseek_v3", {"rope_interleave": False}),
    "v3-yarn": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "v3-yarn-uneven": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "v3-tied-biased": ("deepseek_v3", {"tie_word_embeddings": True, "attention_bias": True}),
    "v3-wide-values": ("deepseek_v3", {"v_head_dim": 32, "qk_nope_head_dim": 8, "kv_lora_rank": 16}),
}


def write_deepseek(folder: Path, name: str) -> Any:
    kind, changes = FAMILIES[name]
    return write_tiny_folder(folder, kind, **{**SMALL, **changes})


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    reference = write_deepseek(folder, request.param)
    return load_model(str(folder)), reference


@torch.inference_mode()
def test_every_shape_computes_what_transformers_computes(family: tuple[LoadedModel, Any]) -> None:
    """Random weights give the reference's logits, from one-shot and from chunked prefill."""
    loaded, reference = family
    prompt = tokens(90)
    expected = reference(torch.tensor([prompt])).logits[0, -1]
    cache = new_cache(loaded.model)
    torch.testing.assert_close(run(loaded.model, cache, prompt, range(6)), expected, atol=2e-4, rtol=2e-4)
    run(loaded.model, cache, prompt[:37], range(8, 14))
    chunked = run(loaded.model, cache, prompt[37:], range(8, 14), context=37)
    torch.testing.assert_close(chunked, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["v2-groups", "v2-dense", "v3", "v3-yarn"])
@pytest.mark.parametrize("form", [Form.NAIVE, Form.ABSORBED])
def test_logits_do_not_depend_on_how_the_work_is_done(tmp_path: Path, name: str, form: Form) -> None:
    """Chunks, batches, reused prefixes and hand-overs leave the logits as they were, in either form."""
    write_deepseek(tmp_path, name)
    check_all(deepseek(tmp_path, form))


@pytest.mark.parametrize("name", ["v2-groups", "v2-dense", "v3"])
def test_int8_weights_keep_every_promise_too(tmp_path: Path, name: str) -> None:
    """Latents, queries and experts rounded: still the same logits whatever way the work is cut."""
    write_deepseek(tmp_path, name)
    check_all(load_model(str(tmp_path), weight_format="int8").model, ROUNDED_CLOSE)


def deepseek(folder: Path, form: Form) -> Deepseek:
    found = find_model(str(folder))
    return Deepseek(found.config, load_weights(found, torch.device("cpu"), torch.float32), form=form)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["v2-yarn", "v3"])
def test_the_naive_and_the_absorbed_form_agree(tmp_path: Path, name: str) -> None:
    """Expanding keys and values, or carrying queries into latent space, is the same attention."""
    write_deepseek(tmp_path, name)
    prompt = tokens(90)
    naive, absorbed = (deepseek(tmp_path, form) for form in (Form.NAIVE, Form.ABSORBED))
    caches = [new_cache(naive), new_cache(absorbed)]
    for model, cache in zip((naive, absorbed), caches, strict=True):
        run(model, cache, prompt[:50], range(6))
    found = [run(m, c, prompt[50:], range(6), context=50) for m, c in zip((naive, absorbed), caches, strict=True)]
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


def test_the_cheaper_form_is_naive_for_long_chunks_and_absorbed_for_short_ones() -> None:
    """With DeepSeek-V3's sizes a chunk pays for the expansion of its context only if it asks often enough."""
    v3 = LatentShape(128, nope_dim=128, rope_dim=64, value_dim=128, rank=512, scale=1.0)
    assert v3.naive_is_cheaper(queries=4096, context=4096)
    assert not v3.naive_is_cheaper(queries=1, context=4096)
    assert not v3.naive_is_cheaper(queries=64, context=8192)


def test_state_is_one_latent_and_one_rotary_key_a_layer(tmp_path: Path) -> None:
    """The bytes that are moved do not depend on the number of heads; model, card and cache say the same."""
    write_deepseek(tmp_path, "v3")
    loaded = load_model(str(tmp_path), kv_dtype="bfloat16")
    assert loaded.model.layout.bytes_per_token == 3 * (24 + 8) * 2
    assert loaded.card.kv_bytes_per_token == loaded.model.layout.bytes_per_token
    assert loaded.card.namespace[-2:] == ("bfloat16", "mla-1")


def moe(routing: Routing, **changes: Any) -> MoEConfig:
    values = {
        "routed_experts": 8,
        "shared_experts": 1,
        "experts_per_token": 2,
        "expert_size": 4,
        "groups": 4,
        "groups_per_token": 2,
        "weight_factor": 1.0,
        "normalise_weights": False,
    }
    return MoEConfig(routing=routing, **{**values, **changes})


def moe_weights(hidden: int, config: MoEConfig) -> MixtureWeights:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    size, count = config.expert_size, config.routed_experts

    def expert() -> Gated:
        return Gated(FloatLinear(random(2 * size, hidden)), FloatLinear(random(hidden, size)))

    return MixtureWeights(random(count, hidden), random(count), expert(), [expert() for _ in range(count)])


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(list(Routing)), st.integers(1, 20), st.integers(0, 100), st.integers(1, 4))
def test_a_mixture_is_the_weighted_sum_of_the_experts_that_a_token_takes(
    routing: Routing, count: int, seed: int, per_token: int
) -> None:
    """Sorting tokens by expert changes nothing: each token gets its shared expert and its own choice."""
    config = moe(routing, experts_per_token=per_token)
    weights = moe_weights(6, config)
    hidden = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    experts, shares = route(hidden, weights, config)
    expected = weights.shared(hidden)
    for token in range(count):
        for expert, share in zip(experts[token].tolist(), shares[token], strict=True):
            expected[token] += share * weights.experts[expert](hidden[token, None])[0]
    torch.testing.assert_close(mixture(hidden, weights, config), expected, atol=1e-4, rtol=1e-4)


def test_a_token_takes_experts_of_its_best_groups_only() -> None:
    """Group-limited routing bounds over how many groups, and so devices, a token's experts are spread."""
    config = moe(Routing.BIASED, experts_per_token=4)
    experts, _ = route(torch.randn(50, 6, generator=torch.Generator().manual_seed(1)), moe_weights(6, config), config)
    assert max(len({expert // 2 for expert in row}) for row in experts.tolist()) <= 2


def hf_config(**changes: Any) -> dict[str, Any]:
    base = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    return {**base, **SMALL, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .*; allowed: null"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; allowed: sigmoid"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; allowed: noaux_tc"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "x"}, "allowed: greedy, group_limited_greedy"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": True}, "norm_topk_prob is True; allowed: False"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"n_group": 3}, r"n_routed_experts is 8; it must be a multiple of n_group \(3\)"),
        ({"topk_group": 5}, "topk_group is 5"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7"),
        ({"mlp_bias": True}, "mlp_bias is True; allowed: False"),
        ({"architectures": ["DeepseekV9ForCausalLM"]}, "allowed: LlamaForCausalLM.*DeepseekV3ForCausalLM"),
    ],
)
def test_a_configuration_we_cannot_compute_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        config_of_folder(hf_config(**changes), "config.json")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    """A folder that lacks tensors gives one clear error."""
    write_deepseek(tmp_path, "v3")
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"n_routed_experts": 8', '"n_routed_experts": 12'))
    with pytest.raises(ModelFileError, match=r"tensor model\.layers\.1\.mlp\.experts\.8\.gate_proj\.weight is missing"):
        load_model(str(tmp_path))


def test_export_says_that_it_writes_another_family(tmp_path: Path) -> None:
    write_deepseek(tmp_path / "in", "v3")
    with pytest.raises(ModelFileError, match="is a DeepseekV3ForCausalLM; export writes the Llama family only"):
        export_model(str(tmp_path / "in"), tmp_path / "out")
