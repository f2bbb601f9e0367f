"""Greedy tokens through the whole live path against a plain forward pass of the same weights by transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from models.export_hf import export_model
from tests.bench.served import Served
from tests.live.observe import MODEL, STORY

pytestmark = [pytest.mark.live, pytest.mark.slow]

NEW_TOKENS = 16
PROMPTS = (
    "The capital of France is",
    STORY + "One night a storm",
    STORY * 8 + "When the sun rose,",
    STORY * 25 + "He closed the journal and",
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Greedy continuation by transformers of weights that we exported."""
    import transformers

    folder = tmp_path_factory.mktemp("reference")
    export_model(MODEL, Path(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))

    def answer(prompt: str) -> str:
        ids = torch.tensor([tokenizer.encode(prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    return answer


def ask(client: openai.OpenAI, prompt: str) -> tuple[str, int, str]:
    """Text, cached tokens and prefill worker of a greedy completion."""
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, extra_body={"ignore_eos": True}
    )
    parsed = raw.parse()
    cached = parsed.usage.prompt_tokens_details.cached_tokens
    return parsed.choices[0].text, cached, raw.headers["x-conductor-prefill-worker"]


def test_one_by_one_and_again_from_cache(served: Served, client: openai.OpenAI, reference: Any) -> None:
    """Batch 1: the first answer computes, the second reuses every full block, and both are the reference's."""
    for prompt in PROMPTS:
        expected = reference(prompt)
        first, _, _ = ask(client, prompt)
        second, cached, _ = ask(client, prompt)
        assert (first, second) == (expected, expected)
        assert cached > 0 or prompt in PROMPTS[:2]


def test_a_mixed_batch_of_four(served: Served, client: openai.OpenAI, reference: Any) -> None:
    """Four prompts of different lengths at once, some of their prefixes cached, decode together."""
    prompts = [f"Again. {prompt}" for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: ask(client, prompt)[0], prompts))
    assert answers == [reference(prompt) for prompt in prompts]


def test_a_prefix_pulled_from_another_worker(served: Served, client: openai.OpenAI, reference: Any) -> None:
    """Of several hits at once some go to the worker that does not hold the prefix, with its KV handed over."""
    prefix = "Somewhere else. " + STORY * 25
    _, _, holder = ask(client, prefix)
    endings = [f"{prefix} Ending number {number}:" for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: ask(client, prompt), endings))
    moved = [cached for _, cached, worker in answers if worker != holder and cached > 0]
    assert moved, f"nothing was pulled: {answers}"
    assert [text for text, _, _ in answers] == [reference(prompt) for prompt in endings]
