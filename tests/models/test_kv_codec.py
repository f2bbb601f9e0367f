"""Packed KV: its size, its error bounds, its refusal of what it cannot hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.kv_codec import KVCodec
from models.kv_layout import FORMATS

SCALED = ["fp8", "int8", "fp4", "mxfp4"]


def rows(count: int, elements: int, spread: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Numbers of very different magnitudes, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, elements, generator=generator) * torch.exp(
        spread * torch.randn(count, elements, generator=generator)
    )


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    elements=st.integers(1, 200),
    seed=st.integers(0, 1000),
    spread=st.floats(0, 3),
    magnitude=st.integers(-20, 12),
    rotate=st.booleans(),
)
def test_a_round_trip_stays_within_the_stated_error(
    name: str, elements: int, seed: int, spread: float, magnitude: int, rotate: bool
) -> None:
    """Whatever the numbers' range, each comes back within its bound."""
    if name == "fp16":
        magnitude = min(magnitude, 2)
    codec, values = KVCodec(name, elements, rotate=rotate), rows(3, elements, spread, seed) * 2.0**magnitude
    error = (codec.decode(codec.encode(values)) - values).abs()
    rounding = values.abs().amax() * 1e-6  # of the rotation itself
    assert bool((error <= codec.max_error(values) * 1.0001 + rounding).all())


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), elements=st.integers(1, 200), seed=st.integers(0, 1000))
def test_packed_rows_take_the_bytes_that_the_layout_counts(name: str, elements: int, seed: int) -> None:
    codec = KVCodec(name, elements)
    packed = codec.encode(rows(4, elements, seed=seed).view(2, 2, elements))
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 2, FORMATS[name].bytes_for(elements))


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(["fp32", "bf16", "fp16", "fp8", "mxfp4"]), elements=st.integers(1, 200), seed=st.integers(0, 1000))
def test_what_was_decoded_encodes_to_the_same_values(name: str, elements: int, seed: int) -> None:
    """The numbers of a format come through it unchanged."""
    codec = KVCodec(name, elements, rotate=False)
    once = codec.decode(codec.encode(rows(2, elements, seed=seed)))
    assert torch.equal(codec.decode(codec.encode(once)), once)


@pytest.mark.parametrize("name", SCALED)
def test_zeros_stay_zeros_and_signs_stay_signs(name: str) -> None:
    """A group without content has no scale to divide by; the largest element keeps its sign and size."""
    assert torch.equal(KVCodec(name, 64).decode(KVCodec(name, 64).encode(torch.zeros(2, 64))), torch.zeros(2, 64))
    codec = KVCodec(name, 64, rotate=False)
    values = torch.zeros(1, 64)
    values[0, 3], values[0, 40] = -5.0, 5.0
    found = codec.decode(codec.encode(values))
    assert math.copysign(1, found[0, 3]) == -1
    torch.testing.assert_close(found, values, rtol=0.26, atol=0.0)


@pytest.mark.parametrize(("name", "expected"), [("fp8", 0.035), ("int8", 0.01), ("fp4", 0.12), ("mxfp4", 0.15)])
def test_normal_numbers_lose_little(name: str, expected: float) -> None:
    """Root mean square error relative to the numbers' own size."""
    codec, values = KVCodec(name, 384), torch.randn(500, 384, generator=torch.Generator().manual_seed(1))
    error = (codec.decode(codec.encode(values)) - values).pow(2).mean().sqrt() / values.pow(2).mean().sqrt()
    assert error.item() < expected


@pytest.mark.parametrize("name", ["fp8", "fp4", "mxfp4"])
def test_rotation_keeps_scores_near_where_one_channel_is_large(name: str) -> None:
    """Queries and keys that are both large in one channel, as attention's are: their products err less."""
    generator = torch.Generator().manual_seed(3)
    keys, queries = torch.randn(400, 64, generator=generator), torch.randn(400, 64, generator=generator)
    keys[:, 5] *= 30
    queries[:, 5] *= 10
    plain, rotated = (KVCodec(name, 64, rotate=rotate) for rotate in (False, True))
    errors = [(((c.decode(c.encode(keys)) - keys) * queries).sum(-1)).pow(2).mean().sqrt() for c in (plain, rotated)]
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize(("code", "value"), list(enumerate([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])))
def test_fp4_numbers_are_those_of_e2m1(code: int, value: float) -> None:
    """A number that e2m1 has is exact, and its code is its place in the format, lower half of the byte first."""
    codec = KVCodec("mxfp4", 4, rotate=False)
    packed = codec.encode(torch.tensor([value, -value, 6.0, -6.0]))
    assert packed.tolist()[:2] == [code | (code | 8) << 4, 0xF7]
    assert codec.decode(packed).tolist() == [value, -value, 6.0, -6.0]


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_state_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    values = torch.ones(2, 64)
    values[1, 7] = bad
    with pytest.raises(ValueError, match=f"infinities or NaN; {name}"):
        KVCodec(name, 64).encode(values)


def test_rows_of_another_width_are_refused() -> None:
    codec = KVCodec("fp8", 64)
    with pytest.raises(ValueError, match="rows have 65 elements; this codec was made for 64"):
        codec.encode(torch.ones(2, 65))
    with pytest.raises(ValueError, match=r"packed rows are torch\.uint8 of 64 bytes; expected uint8 of 65"):
        codec.decode(torch.zeros(2, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match="elements is 0"):
        KVCodec("fp8", 0)
