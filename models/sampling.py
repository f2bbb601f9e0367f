"""Drawing the next token of every sequence of a batch from its logits.

Order of rules, as the field has it: penalties, temperature, top-k, top-p over what top-k left. A random draw depends on (seed,
position) alone: one number from a counter-based generator, turned into a token by the inverse of the cumulative distribution.
So a request placed again on another worker goes on as it would have, and neighbours in the batch do not matter. Reported log
probabilities are the model's own, before any rule. Repetition counts prompt and output; presence and frequency the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_CANDIDATES = 512  # enough for nearly every top-p; a flatter distribution is sorted in full


class SamplingRules(Protocol):
    """How one sequence draws. `temperature == 0` is greedy; `top_k` None keeps all; `logprobs` None reports none."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def seed(self) -> int: ...
    @property
    def logprobs(self) -> int | None: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """What a sequence consists of so far; read only when a penalty asks for it."""

    prompt: Sequence[int]
    output: Sequence[int]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """`top`: the most likely tokens with their log probabilities, best first. Both are empty unless asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@torch.inference_mode()
def sample(
    logits: Tensor,
    rules: Sequence[SamplingRules],
    positions: Sequence[int],
    histories: Sequence[TokenHistory] | None = None,
) -> list[SampledToken]:
    """One token a row of `logits` [sequences, vocab]. `positions`: index of the drawn token in its whole sequence.

    `histories` is needed when any row has a penalty. `logits` is not changed.
    """
    if not len(logits) == len(rules) == len(positions):
        raise ValueError(f"{len(logits)} rows of logits, {len(rules)} rules and {len(positions)} positions; they must agree")
    chosen = _choose(_penalised(logits, rules, histories), rules, positions)
    return [_report(logits[row], token, rules[row].logprobs) for row, token in enumerate(chosen.tolist())]


def uniform_draw(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position` under `seed`."""
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=position)).random())


def has_penalty(rules: SamplingRules) -> bool:
    return bool(rules.presence_penalty or rules.frequency_penalty or rules.repetition_penalty != 1.0)


def _penalised(logits: Tensor, rules: Sequence[SamplingRules], histories: Sequence[TokenHistory] | None) -> Tensor:
    rows = [row for row, rule in enumerate(rules) if has_penalty(rule)]
    if not rows:
        return logits
    if histories is None:
        raise ValueError("a row has a penalty but no histories were given")
    changed = logits.clone()
    for row in rows:
        _penalise(changed[row], rules[row], histories[row])
    return changed


def _penalise(row: Tensor, rules: SamplingRules, history: TokenHistory) -> None:
    if rules.repetition_penalty != 1.0:
        seen = torch.as_tensor(np.unique([*history.prompt, *history.output]).astype(np.int64), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / rules.repetition_penalty, values * rules.repetition_penalty)
    if len(history.output):
        ids, counts = np.unique(np.asarray(history.output, dtype=np.int64), return_counts=True)
        cost = rules.presence_penalty + rules.frequency_penalty * torch.as_tensor(counts, device=row.device)
        row[torch.as_tensor(ids, device=row.device)] -= cost.to(row.dtype)


def _choose(logits: Tensor, rules: Sequence[SamplingRules], positions: Sequence[int]) -> Tensor:
    chosen = logits.argmax(dim=-1)
    plain = [row for row, rule in enumerate(rules) if rule.temperature > 0 and not _truncates(rule)]
    truncated = [row for row, rule in enumerate(rules) if rule.temperature > 0 and _truncates(rule)]
    for rows, draw in ((plain, _draw_plain), (truncated, _draw_truncated)):
        if rows:
            picked = [rules[row] for row in rows]
            draws = [uniform_draw(rules[row].seed, positions[row]) for row in rows]
            uniform = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None]
            chosen[rows] = draw(_tempered(logits[rows], picked), picked, uniform)
    return chosen


def _truncates(rules: SamplingRules) -> bool:
    return rules.top_k is not None or rules.top_p < 1.0


def _tempered(logits: Tensor, rules: Sequence[SamplingRules]) -> Tensor:
    temperatures = torch.tensor([rule.temperature for rule in rules], dtype=torch.float64, device=logits.device)
    shifted = logits.double() - logits.amax(dim=-1, keepdim=True)
    return shifted / temperatures[:, None]


def _draw_plain(tempered: Tensor, rules: Sequence[SamplingRules], uniform: Tensor) -> Tensor:
    return _invert(tempered.softmax(dim=-1), uniform)


def _draw_truncated(tempered: Tensor, rules: Sequence[SamplingRules], uniform: Tensor) -> Tensor:
    """Draw among each row's most likely tokens, looking at a few hundred of them unless more are needed."""
    vocab = tempered.shape[-1]
    top_k = torch.tensor([vocab if rule.top_k is None else min(rule.top_k, vocab) for rule in rules], device=tempered.device)
    top_p = torch.tensor([rule.top_p for rule in rules], dtype=torch.float64, device=tempered.device)
    probabilities = tempered.softmax(dim=-1)
    kept, ids = probabilities.topk(min(vocab, _CANDIDATES), dim=-1)
    if bool(((kept.sum(dim=-1) < top_p) & (top_k > kept.shape[-1])).any()):
        kept, ids = probabilities.topk(vocab, dim=-1)
    beyond_k = torch.arange(kept.shape[-1], device=kept.device) >= top_k[:, None]
    kept = kept.masked_fill(beyond_k, 0.0)
    mass = torch.where(top_k < vocab, kept.sum(dim=-1), 1.0)
    before = (kept.cumsum(dim=-1) - kept) / mass[:, None]
    outside = before >= top_p[:, None]
    outside[:, 0] = False
    kept = kept.masked_fill(outside, 0.0)
    return ids.gather(1, _invert(kept, uniform)[:, None])[:, 0]


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first index at which the cumulative sum exceeds `uniform` of the total."""
    cumulative = probabilities.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]
    return index.clamp_(max=probabilities.shape[-1] - 1)


def _report(logits: Tensor, token_id: int, alternatives: int | None) -> SampledToken:
    if alternatives is None:
        return SampledToken(token_id)
    logprobs = logits.float().log_softmax(dim=-1)
    values, ids = logprobs.topk(min(alternatives, len(logprobs)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token_id, float(logprobs[token_id]), top)
