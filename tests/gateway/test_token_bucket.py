"""Token rates: a burst, then the rate, with debts that are paid back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.gateway.token_bucket import TokenBucket


def test_a_full_bucket_lets_in_and_an_empty_one_says_when() -> None:
    """Ten tokens of debt at five a second are two seconds."""
    bucket = TokenBucket(5.0, 20.0, now_s=0.0)
    assert bucket.wait_s(0.0) is None
    bucket.charge(30, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(2.0)
    assert bucket.wait_s(2.1) is None


def test_savings_end_at_the_burst() -> None:
    bucket = TokenBucket(5.0, 20.0, now_s=0.0)
    assert bucket.level_tokens(1e6) == 20.0


def test_time_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(5.0, 20.0, now_s=10.0)
    bucket.charge(10, 10.0)
    assert bucket.level_tokens(0.0) == 10.0


def test_other_limits_keep_a_debt_and_cut_savings() -> None:
    """A reload of the limits is no amnesty."""
    bucket = TokenBucket(5.0, 20.0, now_s=0.0)
    assert bucket.resized(1.0, 4.0, 0.0).level_tokens(0.0) == 4.0
    bucket.charge(50, 0.0)
    assert bucket.resized(1.0, 4.0, 0.0).level_tokens(0.0) == -30.0


@given(steps=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 500)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_use_over_time_is_bounded_by_burst_and_rate(steps: list[tuple[float, float]]) -> None:
    """Whoever asks only while the bucket lets in never uses more than burst + rate x time + one last request."""
    bucket = TokenBucket(7.0, 100.0, now_s=0.0)
    now_s = used = 0.0
    for pause_s, tokens in steps:
        now_s += pause_s
        if bucket.wait_s(now_s) is None:
            bucket.charge(tokens, now_s)
            used += tokens
            assert used <= 100.0 + 7.0 * now_s + tokens + 1e-6
