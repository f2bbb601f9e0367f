"""The official client against a live gateway."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from conductor.core.types import RejectReason
from tests.doubles.scripted_engine import Script
from tests.gateway.conftest import CONTEXT, MODEL, Live

HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "alias"]
    assert client.models.retrieve(MODEL).owned_by == "kv-conductor"


def test_chat(client: openai.OpenAI, live: Live) -> None:
    live.engine.script = Script(reused_tokens=3)
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=20, seed=1)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("hello", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_chat_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 5


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=8, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["hello", "hello"]
    stream = client.completions.create(model=MODEL, prompt=[1, 2, 3], stream=True, stop="l")
    assert "".join(chunk.choices[0].text for chunk in stream) == "he"


def test_errors_become_the_client_s_exceptions(client: openai.OpenAI, live: Live) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=MODEL, prompt=[1] * (CONTEXT + 1))
    assert (wrong.value.code, wrong.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    live.engine.script = Script(rejection=RejectReason.OVERLOAD)
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(model=MODEL, messages=HELLO)
    assert refused.value.code == "overload"


def test_a_closed_stream_cancels(client: openai.OpenAI, live: Live) -> None:
    live.engine.script = Script(tokens=tuple(b"x" * 100), delay_s=0.01)
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    next(iter(stream))
    stream.close()
    while not live.engine.cancelled:
        pass
    assert live.engine.cancelled == [live.engine.jobs[0].request.id]
