"""A model's layers shared out over stages: the same numbers as in one piece, and no more weights than a stage computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.base import ForwardBatch, PagedKVCache
from models.errors import ModelFileError
from models.llama import Llama
from models.load import load_model
from models.stages import Share
from tests.models.builders import new_cache, run, write_tiny_folder
from tests.models.contract import tokens
from tests.models.test_deepseek import write_deepseek
from tests.models.test_windows import FAMILIES

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    **{name: FAMILIES[name] for name in ("mistral", "qwen3-listed-layers", "gemma2", "gemma3")},
}


class Pipeline:
    """Stages one after the other, each with the KV of its own layers."""

    def __init__(self, folder: Path, of: int) -> None:
        models = [load_model(str(folder), share=Share(number, of)).model for number in range(of)]
        self.stages = [model for model in models if isinstance(model, Llama)]
        self.caches = [PagedKVCache(stage.layout, 24, 16, held=stage.layers) for stage in self.stages]

    def compute(self, batch: ForwardBatch) -> Tensor:
        passed: Tensor | None = None
        for stage, cache in zip(self.stages, self.caches, strict=True):
            passed = stage.forward_stage(batch, passed, cache)
        assert passed is not None
        return passed


@pytest.mark.parametrize("name", KINDS)
def test_stages_compute_what_the_whole_model_does(name: str, tmp_path: Path) -> None:
    """To the bit, by chunk on top of cached context, and the KV of every layer too; without logits none are computed."""
    kind, changes = KINDS[name]
    write_tiny_folder(tmp_path, kind, **changes)
    whole = load_model(str(tmp_path)).model
    prompt, table = tokens(90), [7, 2, 3, 11, 5, 6]
    for of in (2, 3):
        pipeline, cache = Pipeline(tmp_path, of), new_cache(whole)
        for start, stop in ((0, 40), (40, 80), (80, 90)):
            expected = run(whole, cache, prompt[start:stop], table, start)
            batch = ForwardBatch(torch.tensor(prompt[start:stop]), [stop - start], [start], [table], logits=stop == 90)
            found = pipeline.compute(batch)
            assert len(found) == (stop == 90)
        assert torch.equal(found[0], expected)
        kept = [layer for part in pipeline.caches for layer in part.layers]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(kept, cache.layers, strict=True))


def test_a_stage_loads_its_own_weights_alone(tmp_path: Path) -> None:
    """Each layer's weights lie in one stage; the embedding in the first, the head in the last."""
    write_tiny_folder(tmp_path, "llama")
    held: list[tuple[list[int], bool, bool]] = []
    for number in range(3):
        model = load_model(str(tmp_path), share=Share(number, 3)).model
        assert isinstance(model, Llama)
        held.append((list(model.layers), model._embed is not None, model._head is not None))
    assert held == [([0], True, False), ([1], False, False), ([2], False, True)]


def test_what_cannot_be_shared_out_is_refused(tmp_path: Path) -> None:
    """More stages than layers, with the number that is allowed."""
    write_tiny_folder(tmp_path, "llama")
    with pytest.raises(ModelFileError, match="stages is 4; allowed: 1 to 3, the number of the model's layers"):
        load_model(str(tmp_path), share=Share(0, 4))
    write_deepseek(tmp_path / "latent", "v3")
    with pytest.raises(
        ModelFileError, match="stages is 2; allowed: 1 for a model with latent attention, experts or an encoder"
    ):
        load_model(str(tmp_path / "latent"), share=Share(0, 2))
