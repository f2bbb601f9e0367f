"""What a client is told when its request is wrong, refused, or cannot be served."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from conductor.core.types import FinishReason, Priority, RejectReason
from tests.doubles.scripted_engine import Script
from tests.gateway.conftest import CONTEXT, MODEL, Live, StartGateway


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, which always has the four OpenAI keys."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return error


WRONG_FIELDS = [
    ({"temperature": 3}, "temperature", "3"),
    ({"temperature": "hot"}, "temperature", '"hot"'),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": True}, "max_tokens", "true"),
    ({"n": 0}, "n", "0"),
    ({"n": 17}, "n", "17"),
    ({"seed": 2**63}, "seed", str(2**63)),
    ({"stop": [""]}, "stop", ""),
    ({"stop": ["x"] * 17}, "stop", "16"),
    ({"stop": 7}, "stop", "7"),
    ({"logprobs": 21}, "logprobs", "21"),
    ({"echo": True}, "echo", "not supported"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"logit_bias": {"1": 2}}, "logit_bias", "not supported"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"temprature": 1}, "temprature", "temperature"),
    ({"prompt": 5}, "prompt", "token ids"),
    ({"prompt": []}, "prompt", "token ids"),
    ({"prompt": [1, "a"]}, "prompt", "token ids"),
    ({"prompt": [[]]}, "prompt", "token ids"),
    ({"prompt": [True]}, "prompt", "token ids"),
    ({"prompt": [258]}, "prompt", "257"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"stream_options": {"include_usage": True}}, None, "stream"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "1"),
]


@pytest.mark.parametrize(("fields", "param", "words"), WRONG_FIELDS, ids=[str(case[0])[:50] for case in WRONG_FIELDS])
def test_a_wrong_field_is_named_with_its_value(live: Live, fields: dict[str, Any], param: str | None, words: str) -> None:
    error = error_of(live.post("/v1/completions", {"model": MODEL, "prompt": "x", **fields}), 400)
    assert error["param"] == param
    assert words in error["message"]
    assert "allowed" in error["message"]
    assert error["type"] == "invalid_request_error"
    assert live.engine.jobs == []


WRONG_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages.0.name"),
    ({"messages": [{"role": "user", "content": "unrenderable"}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"store": True}, "store"),
    ({"prompt": "x"}, "prompt"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, None),
    ({"top_logprobs": 3}, None),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_CHATS, ids=[str(case[0])[:60] for case in WRONG_CHATS])
def test_a_wrong_chat_field_is_named(live: Live, fields: dict[str, Any], param: str | None) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields}
    assert error_of(live.post("/v1/chat/completions", body), 400)["param"] == param
    assert live.engine.jobs == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "'max_tokens' is 0; allowed: greater than or equal to 1"),
        ({"messages": []}, "'messages' is []; allowed: at least 1 item"),
        (
            {"logit_bias": {"x": 1}},
            "'logit_bias' is {\"x\": 1}; allowed: this field is not supported; leave it out or send null, {}",
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            '\'messages.0.content\' is null; allowed: a string or a list of parts {"type": "text", "text": ...}',
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_complaint_speaks_json(live: Live, fields: dict[str, Any], message: str) -> None:
    """Value and what is allowed are in the client's words, not in those of a Python program."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields}
    assert error_of(live.post("/v1/chat/completions", body), 400)["message"] == message


def test_neutral_values_of_unsupported_fields_are_accepted(live: Live) -> None:
    """Clients send defaults of features that they do not use."""
    neutral = {"tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "store": False, "n": 1, "user": "me"}
    assert live.chat(**neutral).status_code == 200


@pytest.mark.parametrize("raw", [b"", b"{", b"[1", b'{"model": "\\ud800"}', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_is_refused(live: Live, raw: bytes) -> None:
    assert error_of(live.client.post("/v1/completions", content=raw), 400)["code"] == "invalid_json"


@pytest.mark.parametrize("raw", [b"[]", b"null", b"3", b'"text"'])
def test_a_body_that_is_no_object_is_refused(live: Live, raw: bytes) -> None:
    assert "JSON object" in error_of(live.client.post("/v1/completions", content=raw), 400)["message"]


def test_a_missing_field_is_named(live: Live) -> None:
    error = error_of(live.post("/v1/completions", {"prompt": "x"}), 400)
    assert (error["param"], error["code"]) == ("model", "missing_field")


def test_an_unknown_model_is_told_the_known_ones(live: Live) -> None:
    error = error_of(live.post("/v1/completions", {"model": "gpt-9", "prompt": "x"}), 400)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "gpt-9" in error["message"]
    assert f"{MODEL}, alias" in error["message"]


def test_an_over_long_prompt_is_told_the_numbers(live: Live) -> None:
    error = error_of(live.complete([1] * (CONTEXT + 5)), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert str(CONTEXT + 5) in error["message"]
    assert str(CONTEXT) in error["message"]
    assert error_of(live.complete([1] * 100, max_tokens=CONTEXT), 400)["param"] == "max_tokens"


def test_an_answer_may_fill_the_context(live: Live) -> None:
    assert live.complete([1] * (CONTEXT - 1)).status_code == 200
    assert live.engine.jobs[0].sampling.max_tokens == 1


def test_a_refusal_is_429_with_numbers(live: Live) -> None:
    """Machine-readable reason, prediction, objective and shortfall; infinity becomes null."""
    live.engine.script = Script(rejection=RejectReason.TTFT_SLO)
    answer = live.complete(stream=True)
    error = error_of(answer, 429)
    assert (error["code"], error["type"]) == ("ttft_slo", "rate_limit_error")
    assert answer.headers["retry-after"] == "3"
    assert answer.headers["x-conductor-decision-id"] == live.engine.jobs[0].request.id
    assert error["rejection"] == {
        "reason": "ttft_slo",
        "retry_after_s": 2.5,
        "best_worker": "p0",
        "predicted_s": 3.0,
        "predicted_low_s": 2.5,
        "predicted_high_s": None,
        "objective_s": 1.0,
        "shortfall_s": 2.0,
    }
    assert live.engine.cancelled == []


@pytest.mark.parametrize("reason", [RejectReason.NO_PREFILL, RejectReason.NO_DECODE])
def test_no_worker_is_503(live: Live, reason: RejectReason) -> None:
    live.engine.script = Script(rejection=reason, retry_after_s=0.1)
    answer = live.chat()
    assert (error_of(answer, 503)["code"], answer.headers["retry-after"]) == (reason.value, "1")


def test_a_prompt_too_long_for_every_worker_is_400(live: Live) -> None:
    live.engine.script = Script(rejection=RejectReason.TOO_LONG)
    assert error_of(live.chat(), 400)["code"] == "too_long"


def test_one_refused_choice_cancels_the_others(live: Live) -> None:
    """All prompts of a list are answered, or none."""
    live.engine.script = Script(hold_submit=True)
    live.engine.refuse_from = 1
    error_of(live.complete(["a", "b"]), 429)
    assert live.engine.cancelled == [live.engine.jobs[0].request.id]


def test_a_failed_generation_is_503_and_names_the_decision(live: Live) -> None:
    live.engine.script = Script(tokens=(), finish=FinishReason.FAILED, message="two workers died")
    answer = live.complete()
    error = error_of(answer, 503)
    assert (error["code"], error["message"]) == ("generation_failed", "two workers died")
    assert answer.headers["x-conductor-decision-id"] == live.engine.jobs[0].request.id


def test_a_failure_within_a_stream_is_an_event(live: Live) -> None:
    live.engine.script = Script(finish=FinishReason.FAILED)
    answer = live.complete(stream=True)
    lines = [line for line in answer.text.split("\n\n") if line]
    assert (answer.status_code, lines[-1]) == (200, "data: [DONE]")
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "generation_failed"


def test_an_unreachable_cluster_is_503_without_a_traceback(live: Live) -> None:
    live.engine.script = Script(raises=ConnectionError("secret internals"))
    answer = live.complete()
    assert error_of(answer, 503)["code"] == "engine_unavailable"
    assert "secret" not in answer.text
    assert "retry-after" in answer.headers


def test_unknown_routes_and_methods(live: Live) -> None:
    assert error_of(live.client.get("/nowhere"), 404)["code"] == "unknown_route"
    answer = live.client.get("/v1/completions")
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"
    assert error_of(live.post("/v1/embeddings", {}), 404)["code"] == "unsupported_endpoint"


def test_a_large_body_is_413(start_gateway: StartGateway) -> None:
    """With and without a declared length."""
    live = start_gateway(max_body_bytes=2048)
    error = error_of(live.complete("x" * 4096), 413)
    assert "2048" in error["message"]
    chunks = live.client.post("/v1/completions", content=iter([b"x" * 1024] * 4))
    assert error_of(chunks, 413)["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-conductor-ttft-slo-ms", "soon"),
        ("x-conductor-ttft-slo-ms", "-1"),
        ("x-conductor-ttft-slo-ms", "nan"),
        ("x-conductor-tbt-slo-ms", "1e300"),
        ("x-conductor-priority", "urgent"),
        ("x-conductor-class", "two words"),
        ("x-conductor-session", "x" * 257),
        ("x-conductor-tfft-slo-ms", "100"),
        ("x-request-id", "a b"),
    ],
)
def test_a_wrong_header_is_named(live: Live, name: str, value: str) -> None:
    body = {"model": MODEL, "prompt": "x"}
    error = error_of(live.client.post("/v1/completions", json=body, headers={name: value}), 400)
    assert error["param"] == name
    assert "allowed" in error["message"]


def test_headers_reach_the_scheduler(live: Live) -> None:
    body = {"model": MODEL, "prompt": "x"}
    headers = {
        "x-conductor-ttft-slo-ms": "250",
        "x-conductor-tbt-slo-ms": "50.5",
        "x-conductor-priority": "high",
        "x-conductor-class": "agent",
        "x-conductor-session": "s-1",
        "x-request-id": "mine-7",
    }
    answer = live.client.post("/v1/completions", json=body, headers=headers)
    request = live.engine.jobs[0].request
    assert (request.slo.ttft_s, request.slo.tbt_s) == (0.25, 0.0505)
    assert (request.priority, request.traffic_class, request.session) == (Priority.HIGH, "agent", "s-1")
    assert answer.headers["x-request-id"] == "mine-7"


def test_default_objectives_come_from_the_settings(start_gateway: StartGateway) -> None:
    live = start_gateway(default_ttft_slo_s=1.5)
    live.complete()
    assert (live.engine.jobs[0].request.slo.ttft_s, live.engine.jobs[0].request.slo.tbt_s) == (1.5, None)
