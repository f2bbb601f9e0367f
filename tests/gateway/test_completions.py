"""Text and chat completions as any HTTP client sees them."""

from __future__ import annotations

import json
from typing import Any

import httpx

from conductor.core.types import FinishReason
from tests.doubles.scripted_engine import Script
from tests.gateway.conftest import CONTEXT, MODEL, Live, hash_prompt


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(stream: list[dict[str, Any]]) -> str:
    choices = [choice for event in stream for choice in event["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def test_a_completion_has_text_reason_and_usage(live: Live) -> None:
    """Cached tokens are told in all three spellings."""
    live.engine.script = Script(reused_tokens=2)
    answer = live.complete("hey").json()
    assert answer["choices"][0] == {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}
    assert (answer["object"], answer["model"]) == ("text_completion", "test-model")
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 5,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
        "prompt_cache_hit_tokens": 2,
        "prompt_cache_miss_tokens": 2,
    }


def test_a_chat_completion_renders_the_template(live: Live) -> None:
    answer = live.chat([{"type": "text", "text": "good "}, {"type": "text", "text": "day"}]).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    tokens = live.engine.jobs[0].tokens
    assert bytes(tokens[::4]) == b"<user>good day\n<assistant>"


def test_what_is_looked_up_is_the_prompt_that_is_computed(live: Live) -> None:
    """The hashes cover every message as the template renders it, on whichever way the prompt came: the worker gets those very
    tokens, so what it caches is what the next look-up asks for."""
    messages = [{"role": role, "content": f"{role} says {'so ' * 40}"} for role in ("system", "user", "assistant", "user")]
    longer = [*messages[:-1], {"role": "user", "content": "something else, at the same length as before" * 3}]
    for body in ({"messages": messages}, {"messages": messages, "stream": True}, {"messages": longer}):
        live.post("/v1/chat/completions", {"model": MODEL, **body})
    live.complete(list(live.engine.jobs[0].tokens[::4]))
    jobs = live.engine.jobs
    assert [job.request.block_hashes for job in jobs] == [
        hash_prompt(bytes(job.tokens), job.request.cache_domain) for job in jobs
    ]
    first, streamed, other, by_tokens = (job.request.block_hashes for job in jobs)
    assert first == streamed == by_tokens
    shared = sum(mine == theirs for mine, theirs in zip(first, other, strict=False))
    assert 0 < shared < len(first)


def test_a_stream_carries_the_same_text(live: Live) -> None:
    stream = events(live.chat(stream=True))
    assert stream[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(stream) == "hello"
    assert stream[-1]["choices"][0]["finish_reason"] == "stop"
    assert text_of(events(live.complete(stream=True))) == "hello"


def test_usage_ends_a_stream_when_asked_for(live: Live) -> None:
    """Every other event then has a null usage, as the OpenAI API does."""
    stream = events(live.complete(stream=True, stream_options={"include_usage": True}))
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"]["completion_tokens"] == 5
    assert {None} == {event["usage"] for event in stream[:-1]}
    assert all("usage" not in event for event in events(live.complete(stream=True)))


def test_headers_tell_the_placement(live: Live) -> None:
    live.engine.script = Script(reused_tokens=2)
    for fields in ({}, {"stream": True}):
        answer = live.complete(**fields)
        assert live.engine.jobs[-1].request.id == answer.headers["x-conductor-decision-id"]
        assert answer.headers["x-conductor-prefill-worker"] == "p0"
        assert answer.headers["x-conductor-decode-worker"] == "d0"
        assert answer.headers["x-conductor-reused-tokens"] == "2"
        assert answer.headers["x-conductor-predicted-ttft-ms"] == "125.0"


def test_sampling_reaches_the_engine(live: Live) -> None:
    live.complete(
        [1, 2, 3],
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=11,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        stop_token_ids=[5],
        logprobs=3,
    )
    job = live.engine.jobs[0]
    sampling = job.sampling
    assert (
        sampling.max_tokens,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.seed,
    ) == (7, 0.5, 0.9, 40, 11)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, 0.2, 1.1)
    assert (sampling.stop_token_ids, sampling.logprobs) == ((256, 5), 3)
    assert (job.request.prompt_tokens, job.channel) == (3, "test-channel")


def test_the_default_output_limit_is_what_fits(live: Live) -> None:
    live.complete([1] * 96)
    assert live.engine.jobs[0].request.max_output_tokens == CONTEXT - 96
    assert len(live.engine.jobs[0].request.block_hashes) == 1


def test_ignore_eos_leaves_no_stop_token(live: Live) -> None:
    live.complete(ignore_eos=True)
    assert live.engine.jobs[0].sampling.stop_token_ids == ()


def test_the_end_token_is_counted_but_not_shown(live: Live) -> None:
    live.engine.script = Script(ends_with_eos=True)
    answer = live.complete().json()
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("hello", 6)


def test_length_is_the_reason_of_a_full_answer(live: Live) -> None:
    live.engine.script = Script(finish=FinishReason.LENGTH)
    assert live.complete(max_tokens=5).json()["choices"][0]["finish_reason"] == "length"


def test_several_prompts_and_choices_are_numbered(live: Live) -> None:
    """Choice i belongs to prompt i // n; the prompt of several choices is counted once."""
    answer = live.complete(["a", "bc"], n=2, seed=5).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [job.request.prompt_tokens for job in live.engine.jobs] == [2, 2, 3, 3]
    assert [job.sampling.seed for job in live.engine.jobs] == [5, 6, 7, 8]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 20)


def test_characters_of_several_tokens_arrive_whole(live: Live) -> None:
    live.engine.script = Script(tokens=tuple("né 漢字 🙂".encode()))
    assert text_of(events(live.chat(stream=True))) == "né 漢字 🙂"
    pieces = [event["choices"][0]["text"] for event in events(live.complete(stream=True))]
    assert "\ufffd" not in "".join(pieces)


def test_a_broken_last_character_becomes_a_replacement(live: Live) -> None:
    live.engine.script = Script(tokens=tuple("漢".encode()[:2]), finish=FinishReason.LENGTH)
    assert live.complete().json()["choices"][0]["text"] == "\ufffd"


def test_a_stop_string_over_token_boundaries_ends_and_cancels(live: Live) -> None:
    """No part of it is shown, and the engine is told once."""
    live.engine.script = Script(tokens=tuple(b"one END two"))
    answer = live.complete(stop=["END"]).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("one ", "stop")
    assert text_of(events(live.chat(stream=True, stop="END"))) == "one "
    assert [job.request.id for job in live.engine.jobs] == live.engine.cancelled


def test_chat_log_probabilities(live: Live) -> None:
    answer = live.chat(logprobs=True, top_logprobs=2).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["h", "e", "l", "l", "o"]
    assert content[0]["top_logprobs"][1] == {"token": "b", "logprob": -1.5, "bytes": [98]}


def test_completion_log_probabilities(live: Live) -> None:
    logprobs = live.complete(logprobs=1).json()["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["text_offset"]) == (["h", "e", "l", "l", "o"], [0, 1, 2, 3, 4])
    assert logprobs["top_logprobs"][0] == {"h": -0.25, "a": -0.5}


def test_streamed_log_probabilities_stop_with_the_text(live: Live) -> None:
    """Nothing is told about tokens that a stop string removed."""
    live.engine.script = Script(tokens=tuple(b"ab##c"))
    stream = events(live.chat(stream=True, logprobs=True, stop="##"))
    shown = [choice["logprobs"] for event in stream for choice in event["choices"] if choice["logprobs"]]
    assert [entry["token"] for logprobs in shown for entry in logprobs["content"]] == ["a", "b"]
