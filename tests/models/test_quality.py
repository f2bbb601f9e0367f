"""Quality measured on a text of our own: what each KV format costs the default model, and that the measure itself is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.base import ForwardBatch
from models.kv_layout import number_format
from models.load import LoadedModel, load_model
from models.pull import DEFAULT_MODEL
from models.quality import TextScore, score_text
from tests.models.builders import new_cache, run, write_tiny_folder

SAMPLE = Path(__file__).parent / "sample.txt"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_folder(folder, "llama", max_position_embeddings=512)
    return load_model(str(folder))


@pytest.fixture(scope="module")
def exact(default_model: LoadedModel) -> TextScore:
    return score_text(default_model.model, sample_tokens(default_model))


def sample_tokens(loaded: LoadedModel) -> list[int]:
    return loaded.tokenizer.encode(SAMPLE.read_text())


def test_all_logits_are_those_of_each_prefix(tiny: LoadedModel) -> None:
    """Asked for every new token's logits, a model gives what each prefix alone would end in."""
    prompt = list(range(5, 40))
    batch = ForwardBatch(torch.tensor(prompt), [35], [0], [[0, 1, 2]], all_logits=True)
    together = tiny.model.forward(batch, new_cache(tiny.model))
    alone = [run(tiny.model, new_cache(tiny.model), prompt[: n + 1], [0, 1, 2]) for n in range(35)]
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-4, rtol=1e-4)


def test_a_score_does_not_depend_on_how_the_text_is_cut(tiny: LoadedModel) -> None:
    tokens = sample_tokens(tiny)[:200]
    whole, cut = (score_text(tiny.model, tokens, chunk_tokens=n, block_tokens=16) for n in (256, 37))
    torch.testing.assert_close(whole.losses, cut.losses, atol=1e-4, rtol=1e-4)
    assert whole.agreement(cut) > 0.99


def test_a_coarser_format_is_further_from_the_exact_score(tiny: LoadedModel) -> None:
    tokens = sample_tokens(tiny)[:200]
    exact = score_text(tiny.model, tokens)
    same, near, far = (score_text(tiny.model, tokens, codec=name).losses for name in ("fp32", "fp8", "fp4"))
    assert torch.equal(same, exact.losses)
    assert 0 < (near - exact.losses).abs().mean() < (far - exact.losses).abs().mean()


def test_a_text_of_one_token_cannot_be_scored(tiny: LoadedModel) -> None:
    with pytest.raises(ValueError, match="has 1 tokens; scoring needs two"):
        score_text(tiny.model, [5])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "perplexity_rise", "agreement", "bytes_per_token"),
    [("bf16", 0.002, 0.985, 23_040), ("fp8", 0.005, 0.94, 11_700), ("int8", 0.005, 0.97, 11_880)],
)
def test_a_kv_format_keeps_the_default_models_quality(
    default_model: LoadedModel,
    exact: TextScore,
    name: str,
    perplexity_rise: float,
    agreement: float,
    bytes_per_token: int,
) -> None:
    """Relative rise of perplexity and top-1 agreement on the sample text; bytes with their scales.

    The text is short: a rise is held against its limit with its standard error, which rounding order alone moves it by.
    """
    found = score_text(default_model.model, sample_tokens(default_model), codec=name)
    layout = default_model.model.layout
    rise = found.rise(exact)
    print(f"{name}: perplexity {rise.value:+.2%} +- {rise.standard_error:.2%}, agreement {found.agreement(exact):.4f}")
    assert rise.standard_error < 0.005
    assert rise.at_most(perplexity_rise)
    assert layout.num_layers * number_format(name).bytes_for(layout.elements) == bytes_per_token
    assert found.agreement(exact) > agreement


@pytest.mark.slow
def test_fp4_is_not_fit_for_this_models_keys_and_values(default_model: LoadedModel, exact: TextScore) -> None:
    """fp4 in both keys and values costs more than the three per cent of perplexity that one may give for it."""
    found = score_text(default_model.model, sample_tokens(default_model), codec="fp4")
    rise = found.rise(exact)
    print(f"fp4: perplexity {rise.value:+.2%} +- {rise.standard_error:.2%}, agreement {found.agreement(exact):.4f}")
    assert not rise.at_most(0.03)
    assert rise.value < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_weights_in_fewer_bits_cost_less_than_one_per_cent(
    default_model: LoadedModel, exact: TextScore, weight_format: str
) -> None:
    """Perplexity within one per cent, and the same most likely token at 97 of 100 places or more."""
    rounded = load_model(DEFAULT_MODEL, weight_format=weight_format).model
    found = score_text(rounded, sample_tokens(default_model))
    rise, agreement = found.perplexity / exact.perplexity - 1, found.agreement(exact)
    print(f"{weight_format} weights: perplexity {rise:+.2%} on {exact.perplexity:.3f}, {agreement:.4f} agree")
    assert abs(rise) < 0.01
    assert agreement >= 0.97
