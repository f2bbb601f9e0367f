"""The decoder: equal to transformers, and the same whatever way the work is cut up, cached or moved."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from models.base import ForwardBatch
from models.linear import WEIGHT_FORMATS
from models.load import LoadedModel, load_model
from tests.models.builders import LLAMA3_ROPE, YARN_ROPE, greedy, greedy_batch, new_cache, run, write_tiny_folder
from tests.models.contract import CLOSE, ROUNDED_CLOSE, check_all

TEXT = "The scheduler of a disaggregated cluster keeps 123 prefixes where they will be needed, and moves the rest: "

FAMILIES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-all-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-biased": ("llama", {"attention_bias": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}),
    "yarn-rope": ("llama", {"rope_parameters": YARN_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 32, "num_key_value_heads": 1}),
}


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Any]:
    kind, changes = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    reference = write_tiny_folder(folder, kind, **changes)
    return load_model(str(folder)), reference


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_folder(folder, "qwen3", head_dim=16)
    return load_model(str(folder))


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 258, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def test_every_family_computes_what_transformers_computes(family: tuple[LoadedModel, Any]) -> None:
    """Random weights of each architecture and shape give the reference's logits, from one-shot and from chunked prefill."""
    loaded, reference = family
    prompt = tokens(90)
    expected = reference(torch.tensor([prompt])).logits[0, -1]
    cache = new_cache(loaded.model)
    torch.testing.assert_close(run(loaded.model, cache, prompt, range(6)), expected, atol=1e-4, rtol=1e-4)
    run(loaded.model, cache, prompt[:37], range(8, 14))
    chunked = run(loaded.model, cache, prompt[37:], range(8, 14), context=37)
    torch.testing.assert_close(chunked, expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_the_default_model_computes_what_transformers_computes(default_model: LoadedModel, reference_model: Any) -> None:
    """Logits of the dequantised default model agree with the exported weights run by transformers."""
    prompt = default_model.tokenizer.encode(TEXT * 4)
    expected = reference_model(torch.tensor([prompt])).logits[0, -1]
    cache = new_cache(default_model.model)
    torch.testing.assert_close(run(default_model.model, cache, prompt, range(12)), expected, atol=1e-4, rtol=1e-4)


PROMPTS = [
    f"{opening} {subject}"
    for opening in ("def", "The history of", "Ein Gedicht über", "3 facts about", "Once upon a time, in")
    for subject in ("rain", "the sea(n):", "a city of 9 gates", "cache", "trains", "Mars", "bread", "ice", "a fox", "1984")
]


@pytest.mark.slow
@torch.inference_mode()
def test_greedy_text_of_the_default_model_is_the_references(default_model: LoadedModel, reference_model: Any) -> None:
    """Fifty prompts, sixteen tokens each: those that transformers generates, for prompts of one length together and without
    padding, though ours are decoded in one batch."""
    prompts = sorted((default_model.tokenizer.encode(prompt) for prompt in PROMPTS), key=len)
    expected: list[list[int]] = []
    for length, alike in itertools.groupby(prompts, key=len):
        ids = torch.tensor(list(alike))
        together = reference_model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        expected += together[:, length:].tolist()
    assert greedy_batch(default_model.model, prompts, 16) == expected


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_do_not_depend_on_how_the_work_is_done(tmp_path: Path, name: str, weight_format: str) -> None:
    """Chunks, batches, reused prefixes and hand-overs leave the logits as they were, in full weights and in int8."""
    kind, changes = FAMILIES[name]
    write_tiny_folder(tmp_path, kind, **changes)
    check_all(load_model(str(tmp_path), weight_format=weight_format).model, CLOSE if weight_format == "full" else ROUNDED_CLOSE)


def test_greedy_tokens_of_the_default_model_survive_reuse_and_hand_over(default_model: LoadedModel) -> None:
    """Chunked prefill, a reused prefix and a hand-over to scattered blocks leave the greedy text as it was, token for token."""
    model, prompt = default_model.model, default_model.tokenizer.encode(TEXT * 3)
    expected = greedy(model, prompt, 8, range(10), new_cache(model))
    home, away = new_cache(model), new_cache(model)
    run(model, home, prompt[:32], [4, 7])
    last = int(run(model, home, prompt[32:], [4, 7, 1, 2, 9, 11, 13], context=32).argmax())
    away.scatter([0, 8, 3, 6, 5, 12, 14], home.gather([4, 7, 1, 2, 9, 11, 13]))
    found, context = [last], len(prompt)
    while len(found) < 8:
        found.append(int(run(model, away, found[-1:], [0, 8, 3, 6, 5, 12, 14], context).argmax()))
        context += 1
    assert found == expected


def test_layers_are_announced_in_order_once_their_kv_is_written(tiny: LoadedModel) -> None:
    """`on_layer(i)` comes when layer i of the cache holds the whole batch, so that it can be sent while the rest computes."""
    prompt, whole, seen = tokens(20), new_cache(tiny.model), []
    run(tiny.model, whole, prompt, [0, 1])
    cache = new_cache(tiny.model)

    def on_layer(layer: int) -> None:
        seen.append((layer, torch.equal(cache.layers[layer], whole.layers[layer])))

    tiny.model.forward(ForwardBatch(torch.tensor(prompt), [20], [0], [[0, 1]]), cache, on_layer=on_layer)
    assert seen == [(0, True), (1, True), (2, True)]


def test_kv_kept_as_bfloat16_stays_close(tiny: LoadedModel, tmp_path: Path) -> None:
    """Half the KV bytes cost little precision."""
    write_tiny_folder(tmp_path, "qwen3", head_dim=16)
    half = load_model(str(tmp_path), kv_dtype="bfloat16")
    prompt = tokens(60)
    exact, rounded = (run(m, new_cache(m), prompt, range(4)) for m in (tiny.model, half.model))
    assert half.model.layout.bytes_per_token * 2 == tiny.model.layout.bytes_per_token
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.999


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (ForwardBatch(torch.tensor([1, 2]), [3], [0], [[0]]), "query_lens sum to 3"),
        (ForwardBatch(torch.tensor([1]), [1], [16], [[0]]), "too short for 17 tokens"),
        (ForwardBatch(torch.tensor([1]), [1], [0], [[24]]), "outside of the cache's 24 blocks"),
        (ForwardBatch(torch.tensor([1]), [1], [256], [list(range(20))]), "exceeds the model's context of 256"),
        (ForwardBatch(torch.tensor([1]), [1], [0, 0], [[0]]), "they need one a sequence"),
        (ForwardBatch(torch.tensor([]), [0], [0], [[0]]), "must be >= 1"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(tiny: LoadedModel, batch: ForwardBatch, message: str) -> None:
    """Lengths, tables and cache are checked before anything is computed."""
    with pytest.raises(ValueError, match=message):
        tiny.model.forward(batch, new_cache(tiny.model))
