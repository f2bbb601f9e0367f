"""Converts a model to latent attention and writes it as a folder that is served like any other, with what that cost.

A text that the user gives is split: the first part calibrates, the second is read by the original and by the conversion, and
the perplexities are set side by side with the bytes of KV. Unless told, the rank is the smallest of a few whose loss on the
second part stays within bounds; if none does, the largest, and the figures say so.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.convert_mla import Calibration, calibrate, latent_model
from models.deepseek import Deepseek
from models.deepseek_config import DeepseekConfig
from models.errors import ModelFileError
from models.export_hf import TEXT_FILES, export_latent
from models.folder import find_model
from models.hf_folder import load_weights
from models.llama import Llama
from models.load import load_model
from models.quality import TextScore, score_text

RANK_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)  # of the rank that loses nothing
MIN_TEXT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Wanted:
    """`rank` None: the smallest whose perplexity rises by no more than `max_rise`. `tokens`: of the text, at most."""

    rope_dim: int
    rank: int | None = None
    max_rise: float = 0.05
    tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was written, and both sides' perplexity and bytes of KV a token. `agreement`: of the most likely tokens."""

    folder: str
    rank: int
    rope_dim: int
    scored_tokens: int
    original_perplexity: float
    converted_perplexity: float
    agreement: float
    original_kv_bytes: int
    converted_kv_bytes: int

    @property
    def rise(self) -> float:
        return self.converted_perplexity / self.original_perplexity - 1


def convert_folder(name_or_path: str, target: Path, text: str, wanted: Wanted) -> Conversion:
    """Convert a model into the empty or missing folder `target`. Raises `ModelError` with one line for people."""
    if target.exists() and any(target.iterdir()):
        raise ModelFileError(f"{target} is not empty; a conversion is written into a new folder")
    source = find_model(name_or_path)
    loaded = load_model(name_or_path)
    if not isinstance(loaded.model, Llama):
        raise ModelFileError(f"{name_or_path} is a {source.config.architecture}; conversion is for the Llama family")
    tokens = loaded.tokenizer.encode(text)[: min(wanted.tokens, 2 * loaded.model.max_context)]
    if len(tokens) < MIN_TEXT_TOKENS:
        raise ModelFileError(f"the text has {len(tokens)} tokens; conversion needs {MIN_TEXT_TOKENS} at least")
    half = len(tokens) // 2
    weights = load_weights(source, torch.device("cpu"), torch.float32)
    trial = _Trial(loaded.model, weights, calibrate(loaded.model, tokens[:half]), tokens[half:])
    converted, score, exact = trial.choose(wanted)
    export_latent(converted.config, converted.weights, target)
    for name in TEXT_FILES:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, target / name)
    return Conversion(
        folder=str(target),
        rank=converted.config.kv_rank,
        rope_dim=wanted.rope_dim,
        scored_tokens=len(tokens) - half,
        original_perplexity=exact.perplexity,
        converted_perplexity=score.perplexity,
        agreement=score.agreement(exact),
        original_kv_bytes=loaded.model.layout.bytes_per_token,
        converted_kv_bytes=Deepseek(converted.config, converted.weights).layout.bytes_per_token,
    )


@dataclass(frozen=True, slots=True)
class _Converted:
    config: DeepseekConfig
    weights: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Trial:
    model: Llama
    weights: Mapping[str, Tensor]
    calibration: Calibration
    text: Sequence[int]

    def choose(self, wanted: Wanted) -> tuple[_Converted, TextScore, TextScore]:
        """The conversion asked for, its score, and the original's."""
        exact = score_text(self.model, self.text)
        limit = exact.perplexity * (1 + wanted.max_rise)
        if wanted.rank is not None:
            return (*self.attempt(wanted.rank, wanted.rope_dim), exact)
        ranks = candidate_ranks(self.model, wanted.rope_dim)
        found = smallest_within(ranks, lambda rank: self.attempt(rank, wanted.rope_dim)[1].perplexity <= limit)
        return (*self.attempt(found, wanted.rope_dim), exact)

    def attempt(self, rank: int, rope_dim: int) -> tuple[_Converted, TextScore]:
        config, weights = latent_model(self.model, self.weights, self.calibration, rank=rank, rope_dim=rope_dim)
        return _Converted(config, weights), score_text(Deepseek(config, weights), self.text)


def candidate_ranks(model: Llama, rope_dim: int) -> list[int]:
    whole = 2 * model.config.num_kv_heads * model.config.head_dim - rope_dim
    return sorted({max(1, round(share * whole)) for share in RANK_SHARES})


def smallest_within(ranks: Sequence[int], holds: Callable[[int], bool]) -> int:
    """The smallest of the ascending `ranks` that holds, where larger ones hold too; the last when none does."""
    low, high = 0, len(ranks) - 1
    while low < high:
        middle = (low + high) // 2
        if holds(ranks[middle]):
            high = middle
        else:
            low = middle + 1
    return ranks[low]
