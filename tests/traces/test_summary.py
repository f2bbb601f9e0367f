"""Figures of a run: what counts where, and that the JSON keeps to its schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.core.types import SLO
from tests.traces.builders import outcome
from traces import report
from traces.html_report import render_html
from traces.outcomes import LoadSample, OutcomeStatus, RequestOutcome, RunMode, RunResult, mooncake_tbt_s
from traces.summary import summarise

SCHEMA = json.loads((Path(report.__file__).parent / "report.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def run_of(*outcomes: RequestOutcome, **known: Any) -> RunResult:
    given_values: dict[str, Any] = {
        "mode": RunMode.LIVE,
        "trace": "t",
        "slo": SLO(1.0, 0.1),
        "duration_s": 10.0,
        "wall_s": 11.0,
    }
    return RunResult(outcomes=outcomes, **(given_values | known))


def test_tbt_is_the_mean_of_the_longest_tenth_of_the_gaps() -> None:
    gaps = [0.01] * 18 + [0.5, 0.3]
    assert mooncake_tbt_s(gaps) == pytest.approx(0.4)
    assert mooncake_tbt_s([0.1, 0.2]) == 0.2
    assert mooncake_tbt_s([]) is None


def test_rejected_failed_and_unfinished_requests_stay_in_the_denominator() -> None:
    run = run_of(
        outcome(0, ttft_s=0.5, tbt_s=0.05),
        outcome(1, ttft_s=2.0, tbt_s=0.05),
        outcome(2, ttft_s=0.5, tbt_s=0.5),
        outcome(3, OutcomeStatus.REJECTED, reason="ttft_slo"),
        outcome(4, OutcomeStatus.FAILED, reason="timeout", wasted_prefill_tokens=70),
        outcome(5, OutcomeStatus.UNFINISHED, sent_s=None),
        outcome(6, ttft_s=0.1, warmup=True),
    )
    found = summarise(run)
    assert tuple(found[key] for key in ("requests", "completed", "rejected", "failed", "unfinished", "warmup_requests")) == (
        6,
        3,
        {"ttft_slo": 1},
        {"timeout": 1},
        1,
        1,
    )
    assert found["effective_request_capacity"] == pytest.approx(1 / 6)
    assert found["goodput_rps"] == pytest.approx(0.1)
    assert found["wasted_prefill_tokens"] == 70


def test_a_request_of_one_token_meets_any_tbt() -> None:
    assert outcome(0, ttft_s=0.5).meets(SLO(1.0, 0.001))
    assert not outcome(0, ttft_s=None).meets(SLO(1.0, None))


def test_reuse_counts_only_where_it_was_told() -> None:
    found = summarise(run_of(outcome(0, reused_tokens=60), outcome(1, reused_tokens=None), outcome(2, reused_tokens=0)))
    assert (found["token_hit_ratio"], found["prefill_tokens_avoided"]) == (0.3, 60)
    assert summarise(run_of(outcome(0)))["token_hit_ratio"] is None


def test_estimate_error_is_relative_to_what_was_observed() -> None:
    run = run_of(
        outcome(0, ttft_s=1.0, predicted_ttft_s=1.5), outcome(1, ttft_s=2.0, predicted_ttft_s=1.0), outcome(2, ttft_s=1.0)
    )
    error = summarise(run)["estimate_error"]
    assert isinstance(error, dict)
    assert tuple(error[key] for key in ("requests", "median_absolute", "bias", "mean_absolute_s")) == (2, 0.5, 0.0, 0.75)


def test_throughput_per_gpu_needs_the_size_of_the_cluster() -> None:
    assert summarise(run_of(outcome(0), gpus=1, duration_s=10.0))["completed_per_gpu_hour"] == 360.0
    assert summarise(run_of(outcome(0)))["completed_per_gpu_hour"] is None


maybe_s = st.none() | st.floats(1e-6, 1e4)
outcomes = st.builds(
    RequestOutcome,
    index=st.integers(0, 1_000),
    due_s=st.floats(0, 1e5),
    input_tokens=st.integers(1, 10**6),
    status=st.sampled_from(OutcomeStatus),
    sent_s=maybe_s,
    warmup=st.booleans(),
    ttft_s=maybe_s,
    tbt_s=maybe_s,
    tpot_s=maybe_s,
    e2e_s=maybe_s,
    output_tokens=st.integers(0, 1_000),
    reused_tokens=st.none() | st.integers(0, 1_000),
    predicted_ttft_s=maybe_s,
    reason=st.none() | st.text(max_size=5),
    wasted_prefill_tokens=st.integers(0, 1_000),
    falsely_rejected=st.none() | st.booleans(),
)


@settings(max_examples=40)
@given(st.lists(outcomes, max_size=8), st.sampled_from(RunMode), st.sampled_from([SLO(), SLO(1.0, 0.1)]))
def test_every_report_keeps_to_the_schema_and_loses_no_request(found: list[RequestOutcome], mode: RunMode, slo: SLO) -> None:
    """Arrived = completed + rejected + failed + unfinished, and the JSON is what the schema says."""
    summary: dict[str, Any] = summarise(run_of(*found, mode=mode, slo=slo, wall_s=None))
    VALIDATOR.validate(json.loads(json.dumps(summary, allow_nan=False)))
    ended = summary["completed"] + sum(summary["rejected"].values()) + sum(summary["failed"].values()) + summary["unfinished"]
    assert summary["requests"] == ended


def test_html_report_needs_no_network_and_shows_every_plot() -> None:
    run = run_of(
        *(outcome(n, ttft_s=0.1 + n, tbt_s=0.02, e2e_s=2.0 + n, reused_tokens=10, predicted_ttft_s=0.2 + n) for n in range(9)),
        outcome(9, OutcomeStatus.REJECTED, e2e_s=0.1, reason="<b>"),
        loads=[LoadSample(0.0, 0.5, 0.7), LoadSample(1.0, 1.5, 0.2)],
    )
    page = render_html(run, summarise(run))
    assert page.count("<svg") == 6
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert [word for word in ('src="http', 'href="http', "@import", "<script") if word in page] == []
    assert page == render_html(run, summarise(run))


def test_html_report_of_nothing_completed_has_figures_and_no_plots() -> None:
    run = run_of(outcome(0, OutcomeStatus.UNFINISHED, sent_s=None), interrupted=True)
    page = render_html(run, summarise(run))
    assert "<svg" not in page
    assert "stopped before its end" in page
