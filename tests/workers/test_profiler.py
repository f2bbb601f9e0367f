"""Profiling: known costs are recovered, errors told honestly, the measurement remembered, and only for what it is true of."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conductor.core.cost_profile import CostProfile
from models.base import CausalLM, ForwardBatch, KVLayout, PagedKVCache
from workers.cost_fit import (
    DecodeSample,
    KVShape,
    PrefillSample,
    Samples,
    TransferSample,
    fit_profile,
)
from workers.profiler import Profiler, load_profile

TRUTH = CostProfile(
    prefill_base_s=0.05,
    prefill_per_token_s=2e-3,
    prefill_per_token2_s=1e-7,
    decode_base_s=0.08,
    decode_per_sequence_s=0.01,
    decode_per_context_token_s=2e-5,
    kv_bytes_per_token=100,
    block_tokens=16,
    chunk_tokens=512,
)
SHAPE = KVShape(kv_bytes_per_token=100, block_tokens=16, chunk_tokens=512)


def synthetic(noise: float = 0.0, prefill_per_token2_s: float = 1e-7) -> Samples:
    rng, truth = random.Random(5), replace(TRUTH, prefill_per_token2_s=prefill_per_token2_s)

    def shaken(seconds: float) -> float:
        return seconds * rng.uniform(1 - noise, 1 + noise)

    cells = [(n, p) for p in (0, 500, 3000, 6000) for n in (p + 16, p + 100, p + 400, p + 1500)]
    steps = [(b, c * b) for b in (1, 2, 4, 8) for c in (64, 1000)]
    return Samples(
        prefill=tuple(PrefillSample(n, p, shaken(truth.prefill_s(n, p))) for n, p in cells),
        decode=tuple(DecodeSample(b, c, shaken(truth.decode_step_s(b, c))) for b, c in steps),
        transfer=tuple(TransferSample(size, 0.002 + size / 1e9) for size in (10**5, 10**6, 10**8)),
    )


class ClockedModel(CausalLM):
    """A model whose forward pass moves a clock by what `TRUTH` says it takes; the first calls are slower."""

    def __init__(self, max_context: int = 8192, slow_calls: int = 5) -> None:
        self.vocab_size, self.max_context = 10, max_context
        self.layout = KVLayout("fake", 1, 1, (1,), torch.float32)
        self.now = 0.0
        self.calls: list[ForwardBatch] = []
        self._slow_calls = slow_calls

    def forward(self, batch: ForwardBatch, cache: PagedKVCache, *, on_layer: Callable[[int], None] | None = None) -> Tensor:
        self.calls.append(batch)
        if len(batch.query_lens) == 1 and batch.query_lens[0] > 1:
            n, p = batch.query_lens[0] + batch.context_lens[0], batch.context_lens[0]
            seconds = TRUTH.prefill_s(n, p)
        else:
            seconds = TRUTH.decode_step_s(len(batch.query_lens), sum(batch.context_lens) + len(batch.query_lens))
        self.now += seconds * (10 if len(self.calls) <= self._slow_calls else 1)
        return torch.zeros(len(batch.query_lens), self.vocab_size)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONDUCTOR_CACHE", str(tmp_path))


def profiler(model: ClockedModel, blocks: int = 512) -> Profiler:
    return Profiler(model, PagedKVCache(model.layout, blocks, 16), clock=lambda: model.now)


def assert_recovers(profile: CostProfile, rel: float = 1e-3) -> None:
    assert profile.prefill_base_s == pytest.approx(TRUTH.prefill_base_s, rel=rel)
    assert profile.prefill_per_token_s == pytest.approx(TRUTH.prefill_per_token_s, rel=rel)
    assert profile.prefill_per_token2_s == pytest.approx(TRUTH.prefill_per_token2_s, rel=rel)
    assert profile.decode_base_s == pytest.approx(TRUTH.decode_base_s, rel=rel)
    assert profile.decode_per_sequence_s == pytest.approx(TRUTH.decode_per_sequence_s, rel=rel)
    assert profile.decode_per_context_token_s == pytest.approx(TRUTH.decode_per_context_token_s, rel=rel)


def test_exact_times_give_back_the_coefficients() -> None:
    """Prefill (several chunks included), decode and transfer costs come out as they went in, with no error left."""
    fitted = fit_profile(synthetic(), SHAPE)
    assert_recovers(fitted.profile)
    assert fitted.profile.transfer_latency_s == pytest.approx(0.002)
    assert fitted.profile.transfer_bytes_per_s == pytest.approx(1e9)
    assert fitted.prefill_quality.mean_abs_error < 1e-6
    assert fitted.profile.residuals.p10 == pytest.approx(fitted.profile.residuals.p90)
    assert fitted.profile.calibrated


def test_noise_shows_in_quantiles_and_errors() -> None:
    """Ten percent of noise leaves predictions close, and widens the interval around them."""
    fitted = fit_profile(synthetic(noise=0.1), SHAPE)
    assert fitted.profile.prefill_s(4000, 3000) == pytest.approx(TRUTH.prefill_s(4000, 3000), rel=0.1)
    assert fitted.profile.residuals.p10 < 0.97 < fitted.profile.residuals.p50 < 1.03 < fitted.profile.residuals.p90
    assert 0.02 < fitted.prefill_quality.mean_abs_error < 0.1
    assert abs(fitted.prefill_quality.bias) < 0.05
    assert fitted.prefill_quality.mean_abs_error < fitted.prefill_quality.p90_abs_error


def test_short_prompts_count_as_much_as_long_ones() -> None:
    """With costs of another form than the fitted one, the shortest prompt is still predicted within a quarter."""
    samples = synthetic()
    bent = tuple(replace(s, seconds=s.seconds * (1 + s.prompt_tokens / 20_000)) for s in samples.prefill)
    profile = fit_profile(replace(samples, prefill=bent), SHAPE).profile
    assert profile.prefill_s(16, 0) == pytest.approx(bent[0].seconds, rel=0.25)


def test_coefficients_are_never_negative() -> None:
    """Times that fall with the context give a zero coefficient, not a negative one that would reward long prompts."""
    profile = fit_profile(synthetic(noise=0.05, prefill_per_token2_s=-5e-9), SHAPE).profile
    assert profile.prefill_per_token2_s == 0.0
    assert min(profile.prefill_base_s, profile.prefill_per_token_s) >= 0.0


def test_without_transfers_moving_is_free() -> None:
    profile = fit_profile(replace(synthetic(), transfer=()), SHAPE).profile
    assert (profile.transfer_latency_s, profile.transfer_bytes_per_s) == (0.0, float("inf"))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (replace(synthetic(), prefill=synthetic().prefill[:2]), "2 prefill samples are too few"),
        (replace(synthetic(), decode=()), "0 decode samples are too few"),
        (replace(synthetic(), decode=(DecodeSample(1, 5, 0.0),) * 4), r"a decode sample took 0\.0 s"),
    ],
)
def test_samples_that_cannot_be_fitted_are_refused(samples: Samples, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_profile(samples, SHAPE)


def test_measuring_recovers_the_models_costs_and_ignores_first_calls() -> None:
    """The first five calls take ten times as long; the fitted coefficients are those of the settled model."""
    model = ClockedModel()
    fitted = fit_profile(profiler(model).measure(), SHAPE)
    assert_recovers(fitted.profile)


def test_measuring_ends_about_when_its_budget_does() -> None:
    model = ClockedModel(slow_calls=0)
    replace(profiler(model), budget_s=30.0).measure()
    assert 20.0 < model.now < 40.0


def test_a_slow_machine_measures_what_a_calibrated_profile_needs_and_no_more() -> None:
    """With the budget already spent, the first cells still cover prompts and prefixes of all lengths."""
    model = ClockedModel()
    samples = replace(profiler(model), budget_s=0.0).measure()
    assert len(samples.prefill) == 12
    assert len({s.reused_tokens for s in samples.prefill}) == 5
    assert len({s.prompt_tokens - s.reused_tokens for s in samples.prefill}) == 5
    assert fit_profile(samples, SHAPE).profile.calibrated


@pytest.mark.parametrize(("max_context", "blocks"), [(256, 512), (8192, 16)])
def test_cells_stay_inside_of_context_and_cache(max_context: int, blocks: int) -> None:
    """A model of 256 tokens of context, or a cache that holds no more, is measured as far as it goes."""
    model = ClockedModel(max_context)
    samples = profiler(model, blocks).measure()
    assert max(c + q for call in model.calls for c, q in zip(call.context_lens, call.query_lens, strict=True)) <= 256
    assert max(max(table) for call in model.calls for table in call.block_tables) < blocks
    assert fit_profile(samples, SHAPE).profile.calibrated


def test_no_step_is_longer_than_a_chunk() -> None:
    model = ClockedModel()
    replace(profiler(model), chunk_tokens=128).measure()
    assert max(max(call.query_lens) for call in model.calls) == 128


class FlowingModel(ClockedModel):
    """Takes the next chunk after a fraction of the time of one that is not waited for, and what is left of the last in full."""

    stages = 4

    def __init__(self, share: float) -> None:
        super().__init__(slow_calls=0)
        self._share = share

    def forward(self, batch: ForwardBatch, cache: PagedKVCache, *, on_layer: Callable[[int], None] | None = None) -> Tensor:
        began_s = self.now
        logits = super().forward(batch, cache)
        if not batch.logits:
            self.now = began_s + self._share * (self.now - began_s)
        return logits


@pytest.mark.parametrize(("share", "found"), [(0.3, 0.3), (0.1, 0.25), (1.2, 1.0)])
def test_chunks_in_the_flow_of_stages_are_timed_too(share: float, found: float) -> None:
    """The share of a chunk's time after which the next one follows; four stages cannot take them in less than a quarter."""
    profile = fit_profile(profiler(FlowingModel(share)).measure(), SHAPE).profile
    assert profile.flow_share == pytest.approx(found)
    assert_recovers(profile)


def test_transfers_are_timed_by_the_callers_function() -> None:
    """A link of 3 ms and 500 MB/s is found as such."""
    model = ClockedModel()

    def move(transfer_bytes: int) -> None:
        model.now += 0.003 + transfer_bytes / 5e8

    profile = fit_profile(replace(profiler(model), transfer=move).measure(), SHAPE).profile
    assert profile.transfer_latency_s == pytest.approx(0.003, rel=1e-3)
    assert profile.transfer_bytes_per_s == pytest.approx(5e8, rel=1e-3)


def test_a_profile_is_measured_once_and_remembered() -> None:
    model = ClockedModel()
    first = profiler(model).load_or_measure("rev")
    calls = len(model.calls)
    assert profiler(model).load_or_measure("rev") == first
    assert len(model.calls) == calls
    profiler(model).load_or_measure("rev", fresh=True)
    assert len(model.calls) > calls


def test_another_revision_dtype_or_chunk_is_another_profile() -> None:
    model = ClockedModel()
    keys = {
        profiler(model).key("rev", "float32"),
        profiler(model).key("other", "float32"),
        profiler(model).key("rev", "bfloat16"),
        replace(profiler(model), chunk_tokens=256).key("rev", "float32"),
    }
    assert len({key.path for key in keys}) == 4


def test_a_damaged_or_foreign_memory_is_measured_again() -> None:
    """Half a file, or a file that speaks of another key, is not believed."""
    model = ClockedModel()
    key = profiler(model).key("rev", "float32")
    first = profiler(model).load_or_measure("rev")
    whole = json.loads(key.path.read_text())
    for content in ("{", "[]", "{}", json.dumps({**whole, "key": {}}), json.dumps({**whole, "fitted": {"profile": 3}})):
        key.path.write_text(content)
        assert load_profile(key) is None
    assert profiler(model).load_or_measure("rev").profile.samples == first.profile.samples
    assert load_profile(key) is not None
