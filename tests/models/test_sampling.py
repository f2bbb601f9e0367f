"""Drawing tokens: supports, determinism, penalties and reported log probabilities."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.sampling import SampledToken, TokenHistory, sample, uniform_draw


@dataclass(frozen=True)
class Rules:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values)


def draws(logits: list[float], rules: Rules, count: int) -> Counter[int]:
    batch = torch.tensor([logits] * count)
    return Counter(token.token_id for token in sample(batch, [rules] * count, range(count)))


logit_rows = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40)


def test_temperature_zero_takes_the_most_likely_token() -> None:
    """Greedy rows ignore seed, top-k and top-p."""
    logits = rows([0.0, 3.0, 1.0], [5.0, 3.0, 1.0])
    rules = [Rules(temperature=0.0, seed=1), Rules(temperature=0.0, top_k=2, top_p=0.1)]
    assert [token.token_id for token in sample(logits, rules, [0, 0])] == [1, 0]


@given(logit_rows, st.integers(1, 50), st.integers(-(2**63), 2**64), st.integers(0, 100_000))
@settings(max_examples=60)
def test_top_k_draws_one_of_the_k_most_likely(logits: list[float], k: int, seed: int, position: int) -> None:
    """Nothing outside of the k largest logits is ever drawn; logits whose probabilities round to the same tie."""
    (token,) = sample(rows(logits), [Rules(top_k=k, seed=seed)], [position])
    assert logits[token.token_id] >= sorted(logits, reverse=True)[:k][-1] - 1e-12


@given(logit_rows, st.floats(0.01, 1.0), st.integers(0, 1000))
@settings(max_examples=60)
def test_top_p_draws_from_the_smallest_set_that_holds_the_mass(logits: list[float], top_p: float, position: int) -> None:
    """The tokens more likely than the drawn one hold less than top_p together."""
    (token,) = sample(rows(logits), [Rules(top_p=top_p, seed=3)], [position])
    probabilities = torch.tensor(logits, dtype=torch.float64).softmax(0)
    better = probabilities[probabilities > probabilities[token.token_id]].sum()
    assert float(better) < top_p + 1e-9


@given(logit_rows, st.integers(0, 2**32), st.integers(0, 9000), st.sampled_from([None, 3]), st.sampled_from([1.0, 0.8]))
@settings(max_examples=40)
def test_a_draw_depends_on_seed_and_position_alone(
    logits: list[float], seed: int, position: int, top_k: int | None, top_p: float
) -> None:
    """The same row draws the same token alone and among neighbours with other rules."""
    rules = Rules(seed=seed, top_k=top_k, top_p=top_p)
    neighbours = [Rules(temperature=0.0), Rules(seed=seed + 1, top_p=0.5), Rules(seed=9)]
    (alone,) = sample(rows(logits), [rules], [position])
    together = sample(torch.tensor([logits] * 4), [neighbours[0], rules, *neighbours[1:]], [0, position, 7, 8])
    assert together[1] == alone


def test_other_seeds_and_positions_draw_other_numbers() -> None:
    """Ten thousand (seed, position) pairs give ten thousand numbers, evenly spread."""
    numbers = [uniform_draw(seed, position) for seed in range(100) for position in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert all(900 < sum(i / 10 <= x < (i + 1) / 10 for x in numbers) < 1100 for i in range(10))


@pytest.mark.parametrize("rules", [Rules(), Rules(top_k=3), Rules(top_p=0.999)])
def test_draws_follow_the_distribution(rules: Rules) -> None:
    """Probabilities of 0.5, 0.3 and 0.2 show in the counts, whichever way the draw is made."""
    counts = draws(torch.tensor([0.5, 0.3, 0.2]).log().tolist(), rules, 4000)
    assert [counts[i] / 4000 for i in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def test_a_flat_distribution_is_sorted_in_full_for_top_p() -> None:
    """When a few hundred candidates do not hold the mass, tokens beyond them are still drawn."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(5000, generator=generator) * 0.01
    found = draws(logits.tolist(), Rules(top_p=0.99), 50)
    rank = logits.argsort(descending=True).argsort()
    assert max(int(rank[token]) for token in found) > 512


def test_low_temperature_sharpens() -> None:
    assert draws([1.0, 0.9, 0.0], Rules(temperature=0.001), 50) == Counter({0: 50})


def test_repetition_penalty_counts_prompt_and_output() -> None:
    """Seen tokens lose: positive logits are divided, negative ones multiplied."""
    rules = Rules(temperature=0.0, repetition_penalty=2.0)
    logits = rows([4.0, 3.0, 2.5])
    assert [t.token_id for t in sample(logits, [rules], [5], [TokenHistory(prompt=[0], output=[1])])] == [2]
    logits = rows([-1.0, -1.5, -3.0])
    assert [t.token_id for t in sample(logits, [rules], [5], [TokenHistory(prompt=[0], output=[])])] == [1]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [(Rules(temperature=0.0, presence_penalty=1.5), 0), (Rules(temperature=0.0, frequency_penalty=1.0), 1)],
)
def test_presence_counts_once_and_frequency_each_time(rules: Rules, expected: int) -> None:
    """Tokens 0 (three times) and 1 (once) were emitted; the prompt's tokens do not count."""
    history = TokenHistory(prompt=[2, 2, 2], output=[0, 1, 0, 0])
    (token,) = sample(rows([4.0, 3.0, 1.0]), [rules], [7], [history])
    assert token.token_id == expected


def test_a_penalty_without_history_is_refused() -> None:
    with pytest.raises(ValueError, match="no histories"):
        sample(rows([1.0, 2.0]), [Rules(presence_penalty=1.0)], [0])


def test_rows_rules_and_positions_must_agree() -> None:
    with pytest.raises(ValueError, match="must agree"):
        sample(rows([1.0, 2.0]), [Rules(), Rules()], [0])


def test_log_probabilities_are_the_models_own() -> None:
    """Temperature and penalties choose the token; what is reported is log softmax of the raw logits, best first."""
    logits = rows([1.0, 2.0, 0.0])
    expected = logits[0].log_softmax(0)
    rules = Rules(temperature=0.0, logprobs=2, presence_penalty=5.0)
    (token,) = sample(logits, [rules], [1], [TokenHistory(prompt=[], output=[1])])
    assert token.token_id == 0
    assert token.logprob == pytest.approx(float(expected[0]))
    assert [entry[0] for entry in token.top] == [1, 0]
    assert [entry[1] for entry in token.top] == pytest.approx([float(expected[1]), float(expected[0])])


def test_log_probabilities_come_only_when_asked_for() -> None:
    none, chosen_only = sample(
        rows([1.0, 2.0], [1.0, 2.0]), [Rules(temperature=0.0), Rules(temperature=0.0, logprobs=0)], [0, 0]
    )
    assert none == SampledToken(1)
    assert chosen_only.top == ()
    assert replace(chosen_only, logprob=None) == SampledToken(1)
