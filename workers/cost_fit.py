"""From measured times to a `CostProfile`: non-negative least squares on relative errors, and how far off the fit is.

Prefill follows the form that the scheduler evaluates (`conductor.core.cost_profile`): one base for each step, the new tokens,
and n^2 - p^2. Samples are weighted by 1/time^2, so that a short prompt counts as much as a long one. Every sample is also
predicted by a fit that has not seen it (k folds); the quantiles of actual over predicted, mean absolute error and bias come
from those predictions alone. Pure: knows nothing of models, clocks or files. scikit-learn comes in with the first fit: a worker
whose profile is remembered starts without it, a second sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conductor.core.cost_profile import CostProfile, ResidualQuantiles

_FOLDS = 5


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """Computing tokens `reused_tokens..prompt_tokens` took `seconds`."""

    prompt_tokens: int
    reused_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One step of `batch` sequences, holding `context_tokens` together, took `seconds`."""

    batch: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TransferSample:
    transfer_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Samples:
    """Everything measured of one worker."""

    prefill: tuple[PrefillSample, ...]
    decode: tuple[DecodeSample, ...]
    transfer: tuple[TransferSample, ...] = ()
    flow_share: float = 1.0  # of a step's time, after which the worker takes the next one


@dataclass(frozen=True, slots=True)
class FitQuality:
    """Errors relative to the actual time, on samples that the fit had not seen. `bias` > 0: predictions are too high."""

    mean_abs_error: float
    p90_abs_error: float
    bias: float


@dataclass(frozen=True, slots=True)
class FittedProfile:
    profile: CostProfile
    prefill_quality: FitQuality
    decode_quality: FitQuality


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a profile has to carry of the cache and of how prompts are cut."""

    kv_bytes_per_token: int
    block_tokens: int
    chunk_tokens: int


def fit_profile(samples: Samples, shape: KVShape) -> FittedProfile:
    """Fit all coefficients. Raises `ValueError` when a kind has fewer samples than coefficients, or a time is not positive."""
    prefill = _Design.of(samples.prefill, lambda s: _prefill_features(s, shape.chunk_tokens), "prefill")
    decode = _Design.of(samples.decode, lambda s: (1.0, s.batch, s.context_tokens), "decode")
    base, per_token, per_token2 = prefill.coefficients()
    decode_base, per_sequence, per_context = decode.coefficients()
    latency_s, bytes_per_s = _fit_transfer(samples.transfer)
    unseen = prefill.seconds / prefill.unseen_predictions()
    p10, p50, p90 = (float(q) for q in np.quantile(unseen, (0.1, 0.5, 0.9)))
    profile = CostProfile(
        prefill_base_s=base,
        prefill_per_token_s=per_token,
        prefill_per_token2_s=per_token2,
        decode_base_s=decode_base,
        decode_per_sequence_s=per_sequence,
        decode_per_context_token_s=per_context,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        block_tokens=shape.block_tokens,
        transfer_latency_s=latency_s,
        transfer_bytes_per_s=bytes_per_s,
        chunk_tokens=shape.chunk_tokens,
        flow_share=samples.flow_share,
        residuals=ResidualQuantiles(p10, p50, p90),
        samples=len(samples.prefill),
    )
    return FittedProfile(profile, prefill.quality(), decode.quality())


def _prefill_features(sample: PrefillSample, chunk_tokens: int) -> tuple[float, ...]:
    n, p = sample.prompt_tokens, sample.reused_tokens
    return (-(-(n - p) // chunk_tokens), n - p, n * n - p * p)


def _fit_transfer(samples: Sequence[TransferSample]) -> tuple[float, float]:
    """(latency in seconds, bytes a second); no cost at all when nothing was measured."""
    if not samples:
        return 0.0, float("inf")
    latency_s, s_per_byte = _Design.of(samples, lambda s: (1.0, s.transfer_bytes), "transfer").coefficients()
    return latency_s, 1.0 / s_per_byte if s_per_byte > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class _Design:
    """A regression without intercept: one row of features and one time a sample."""

    features: NDArray[np.float64]
    seconds: NDArray[np.float64]

    @classmethod
    def of(cls, samples: Sequence[Any], features: Callable[[Any], tuple[float, ...]], kind: str) -> _Design:
        rows = np.asarray([features(sample) for sample in samples], dtype=np.float64)
        seconds = np.asarray([sample.seconds for sample in samples], dtype=np.float64)
        if not len(rows) or len(rows) < rows.shape[1]:
            raise ValueError(f"{len(rows)} {kind} samples are too few to fit")
        if not (seconds > 0).all():
            raise ValueError(f"a {kind} sample took {seconds.min()} s; times must be positive")
        return cls(rows, seconds)

    def coefficients(self) -> tuple[float, ...]:
        """Non-negative, least squares of the relative error. Columns are scaled to one magnitude for the solver's sake."""
        from sklearn.linear_model import LinearRegression

        scale = self.features.max(axis=0)
        model = LinearRegression(fit_intercept=False, positive=True)
        model.fit(self.features / scale, self.seconds, sample_weight=self.seconds**-2)
        return tuple(float(value) for value in model.coef_ / scale)

    def unseen_predictions(self) -> NDArray[np.float64]:
        """Each sample's time as predicted by a fit on the other folds."""
        from sklearn.model_selection import KFold

        predicted = np.empty_like(self.seconds)
        folds = KFold(min(_FOLDS, len(self.seconds)), shuffle=True, random_state=0)
        for seen, unseen in folds.split(self.features):
            part = _Design(self.features[seen], self.seconds[seen])
            predicted[unseen] = self.features[unseen] @ np.asarray(part.coefficients())
        return predicted

    def quality(self) -> FitQuality:
        error = self.unseen_predictions() / self.seconds - 1.0
        return FitQuality(float(np.abs(error).mean()), float(np.quantile(np.abs(error), 0.9)), float(error.mean()))
