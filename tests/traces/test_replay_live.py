"""Live replay against a scripted server: timing, accounting, refusals, faults, stopping."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from conductor.core.types import SLO
from tests.traces.scripted_server import Script, scripted_app, serving
from traces.live_server import EndpointError, fitting_range
from traces.outcomes import OutcomeStatus, RequestOutcome, RunResult
from traces.replay import LiveOptions, replay_live
from traces.schema import TraceRequest
from traces.synthesize import TokenRange


def trace_of(*lengths: int, gap_s: float = 0.0, output: int = 4) -> list[TraceRequest]:
    return [TraceRequest(100.0 + gap_s * place, length, output) for place, length in enumerate(lengths)]


def replayed(trace: list[TraceRequest], script: Script, **options: object) -> RunResult:
    with serving(scripted_app(script)) as url:
        return asyncio.run(replay_live(trace, replace(LiveOptions(url), **options)))  # type: ignore[arg-type]


def statuses(run: RunResult) -> list[tuple[str, str | None]]:
    return [(outcome.status.value, outcome.reason) for outcome in run.outcomes]


def test_completed_request_is_timed_and_its_reuse_and_prediction_are_read() -> None:
    """Ten tokens, two milliseconds apart at least."""
    [found] = replayed(trace_of(60, output=10), Script()).outcomes
    assert (
        found.status,
        found.input_tokens,
        found.output_tokens,
        found.reused_tokens,
        found.predicted_ttft_s,
    ) == (OutcomeStatus.COMPLETED, 60, 10, 30, 0.004)
    assert found.ttft_s is not None
    assert found.tbt_s is not None
    assert found.tpot_s is not None
    assert found.e2e_s is not None
    assert 0.002 <= found.ttft_s < found.e2e_s
    assert 0 < found.tpot_s <= found.tbt_s


def test_request_body_is_a_streamed_completion_of_token_ids() -> None:
    script = Script()
    replayed(trace_of(60), script)
    [body] = script.bodies
    assert {"model": "scripted", "max_tokens": 4, "temperature": 0, "stream": True, "ignore_eos": True}.items() <= body.items()
    assert body["stream_options"] == {"include_usage": True}
    assert all(1_000 <= token < 30_000 for token in body["prompt"])


def test_every_kind_of_end_is_told_apart() -> None:
    """Refusals by reason, errors by kind; each request has one outcome, in trace order."""
    script = Script(
        reject_lengths=frozenset({1}),
        unavailable_lengths=frozenset({2}),
        refuse_lengths=frozenset({3}),
        cut_lengths=frozenset({4}),
        error_lengths=frozenset({5}),
        silent_lengths=frozenset({6}),
        hang_lengths=frozenset({7}),
    )
    run = replayed(trace_of(1, 2, 3, 4, 5, 6, 7, 8), script, timeout_s=1.5)
    assert statuses(run) == [
        ("rejected", "ttft_slo"),
        ("rejected", "no_prefill_worker"),
        ("failed", "http_400"),
        ("failed", "stream_cut"),
        ("failed", "retries_exhausted"),
        ("failed", "no_token"),
        ("failed", "timeout"),
        ("completed", None),
    ]
    assert [outcome.wasted_prefill_tokens for outcome in run.outcomes] == [0, 0, 0, 4, 3, 0, 0, 0]


def test_rejection_after_the_stream_has_begun_is_a_rejection_with_its_waste() -> None:
    [found] = replayed(trace_of(9), Script(late_reject_lengths=frozenset({9}))).outcomes
    assert (found.status, found.reason, found.wasted_prefill_tokens) == (OutcomeStatus.REJECTED, "tbt_slo", 5)


def test_session_class_and_objectives_are_told_as_far_as_a_header_can_carry_them() -> None:
    script = Script()
    known = TraceRequest(0.0, 5, 1, session="s-1", traffic_class="chat")
    odd = TraceRequest(0.0, 5, 1, session="a b", traffic_class="Conversation log")
    replayed([known], script, slo=SLO(1.5, 0.2), send_slo=True)
    replayed([odd], script)
    told = [{name: value for name, value in each.items() if name.startswith("x-conductor-")} for each in script.headers]
    objectives = {"x-conductor-ttft-slo-ms": "1500", "x-conductor-tbt-slo-ms": "200"}
    assert told == [objectives | {"x-conductor-session": "s-1", "x-conductor-class": "chat"}, {}]


def test_load_over_workers_comes_from_what_each_computed() -> None:
    """Two workers compute 50 and 10 tokens: the busier one has five thirds of the mean."""
    run = replayed(trace_of(100, 20), Script(prefill_workers=("a", "b")), max_concurrency=1)
    assert {"a", "b"} == {outcome.prefill_worker for outcome in run.outcomes}
    assert run.load_max_over_mean == pytest.approx(50 / 30)
    assert replayed(trace_of(5), Script()).load_max_over_mean is None


def test_arrivals_keep_the_trace_s_gaps_divided_by_speed() -> None:
    """Open loop: nobody waits for an answer. No request leaves early."""
    run = replayed(trace_of(9, 9, 9, gap_s=1.0), Script(token_gap_s=0.1), speed=10.0)
    assert pytest.approx([outcome.due_s for outcome in run.outcomes]) == [0.0, 0.1, 0.2]
    assert all((outcome.lag_s or 0.0) >= 0.0 and outcome.sent_s is not None for outcome in run.outcomes)
    assert [outcome.sent_s for outcome in run.outcomes] == sorted(outcome.sent_s or 0.0 for outcome in run.outcomes)


@pytest.mark.parametrize(("limit", "most"), [(None, 6), (2, 2)])
def test_concurrency_is_unbounded_unless_limited(limit: int | None, most: int) -> None:
    script = Script(token_gap_s=0.1)
    run = replayed(trace_of(*[9] * 6), script, max_concurrency=limit)
    assert most == script.most_in_flight
    assert len(run.outcomes) == 6


def test_warm_up_goes_first_one_by_one_and_is_marked() -> None:
    script = Script()
    run = replayed(trace_of(11, 12, 13, 14), script, warmup=2)
    assert [outcome.warmup for outcome in run.outcomes] == [True, True, False, False]
    assert [len(body["prompt"]) for body in script.bodies[:2]] == [11, 12]
    assert run.outcomes[2].due_s == 0.0


def test_stopping_gives_every_request_that_was_taken_an_outcome() -> None:
    """Two in flight and two not yet due when the replay is stopped; what was finished stays finished."""
    script = Script(hang_lengths=frozenset({7}))
    trace = [*trace_of(8, 7, 7), TraceRequest(10_000.0, 8, 4), TraceRequest(10_001.0, 8, 4)]
    run = asyncio.run(_stopped_when(trace, script, finished=1))
    assert run.interrupted
    assert [outcome.index for outcome in run.outcomes] == [0, 1, 2, 3, 4]
    assert Counter(completed=1, unfinished=4) == Counter(status for status, _ in statuses(run))


async def _stopped_when(trace: list[TraceRequest], script: Script, finished: int) -> RunResult:
    stop = asyncio.Event()
    seen: list[RequestOutcome] = []

    def progress(outcome: RequestOutcome) -> None:
        seen.append(outcome)
        if len(seen) == finished:
            asyncio.get_running_loop().call_later(0.1, stop.set)

    with serving(scripted_app(script)) as url:
        return await replay_live(trace, LiveOptions(url), progress=progress, stop=stop)


def test_stopping_during_warm_up_ends_the_replay() -> None:
    async def stopped() -> RunResult:
        stop = asyncio.Event()
        with serving(scripted_app(Script(hang_lengths=frozenset({7})))) as url:
            asyncio.get_running_loop().call_later(0.2, stop.set)
            return await replay_live(trace_of(7, 7, 7), LiveOptions(url, warmup=3), stop=stop)

    assert "unfinished" in {status for status, _ in statuses(asyncio.run(stopped()))}


def test_server_that_goes_away_fails_requests_and_not_the_replay() -> None:
    """A server that vanishes behind /v1/models is an outcome of each request."""
    with _address_of_nobody() as url, pytest.raises(EndpointError, match="does not answer"):
        asyncio.run(replay_live(trace_of(5), LiveOptions(url)))


@contextmanager
def _address_of_nobody() -> Iterator[str]:
    with serving(scripted_app(Script())) as url:
        pass
    yield url


def test_model_is_the_server_s_first_or_the_named_one() -> None:
    models = ({"id": "a"}, {"id": "b"})
    assert replayed(trace_of(5), Script(models=models)).settings["model"] == "a"
    assert replayed(trace_of(5), Script(models=models), model="b").settings["model"] == "b"
    with pytest.raises(EndpointError, match=r"model is 'c'; .* serves a, b"):
        replayed(trace_of(5), Script(models=models), model="c")


def test_server_without_a_model_is_refused() -> None:
    with pytest.raises(EndpointError, match="serves no model at all"):
        replayed(trace_of(5), Script(models=()))


def test_prompts_stay_inside_a_small_vocabulary() -> None:
    script = Script(models=({"id": "tiny", "vocab_size": 320},))
    replayed(trace_of(200), script)
    assert all(20 <= token < 300 for token in script.bodies[0]["prompt"])


def test_range_is_kept_when_the_vocabulary_is_unknown_or_large() -> None:
    assert TokenRange(5, 9) == fitting_range(TokenRange(5, 9), None) == fitting_range(TokenRange(5, 9), 9)


def test_header_that_is_no_number_is_no_prediction() -> None:
    [found] = replayed(trace_of(5), Script(predicted_ttft_ms="soon")).outcomes
    assert found.predicted_ttft_s is None


def test_objectives_reach_the_result() -> None:
    run = replayed(trace_of(5), Script(), slo=SLO(0.5, 0.1))
    assert SLO(0.5, 0.1) == run.slo


@pytest.mark.parametrize("bad", [{"speed": 0.0}, {"scale": -1.0}, {"timeout_s": 0.0}, {"max_concurrency": 0}, {"warmup": -1}])
def test_options_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        LiveOptions("http://127.0.0.1:1", **bad)  # type: ignore[arg-type]
