"""The bodies of answers, byte for byte: chat completions and text completions, whole and as server-sent events.

Streaming writes one small JSON object a token, so the parts that do not change are encoded once for each request and the
common case (text without log probabilities) is put together from bytes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conductor.core.types import FinishReason
from conductor.gateway.assembler import Delta, TokenEntry
from conductor.gateway.served_model import Tokenizer

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `reused_tokens` of the prompt came from cache."""

    prompt_tokens: int
    output_tokens: int
    reused_tokens: int

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.reused_tokens},
            "prompt_cache_hit_tokens": self.reused_tokens,
            "prompt_cache_miss_tokens": self.prompt_tokens - self.reused_tokens,
        }


@dataclass(slots=True)
class Whole:
    """A choice of an answer that is not streamed, as it grows."""

    text: list[str]
    entries: list[TokenEntry]
    finish: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.entries.extend(delta.entries)
        self.finish = delta.finish


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer repeats."""

    id: str
    created_s: int
    model: str
    alternatives: int | None
    include_usage: bool


class Format(ABC):
    """Writes one answer. `whole_object` and `chunk_object` are the OpenAI names of the two kinds of object."""

    whole_object: str
    chunk_object: str

    def __init__(self, head: Head, tokenizer: Tokenizer) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._before = b"data: " + self._opened(self.chunk_object)
        self._after = b', "usage": null}\n\n' if head.include_usage else b"}\n\n"

    def _opened(self, kind: str) -> bytes:
        """An object up to the fields that differ."""
        head, model = self._head, json.dumps(self._head.model)
        return f'{{"id": "{head.id}", "object": "{kind}", "created": {head.created_s}, "model": {model}, '.encode()

    def opening(self, choices: int) -> bytes:
        """Events before the first token."""
        return b""

    @abstractmethod
    def delta(self, index: int, delta: Delta) -> bytes:
        """Events for one delta of choice `index`."""

    @abstractmethod
    def choice(self, index: int, whole: Whole) -> dict[str, Any]:
        """A finished choice of an answer that is not streamed."""

    def usage(self, usage: Usage) -> bytes:
        """The last event before `DONE` when the client asked for usage."""
        return self._before + b'"choices": [], "usage": ' + json.dumps(usage.to_json()).encode() + b"}\n\n"

    def whole(self, choices: Sequence[Whole], usage: Usage) -> bytes:
        rest = {"choices": [self.choice(index, whole) for index, whole in enumerate(choices)], "usage": usage.to_json()}
        return self._opened(self.whole_object) + json.dumps(rest).encode()[1:]

    def _event(self, choice: dict[str, Any]) -> bytes:
        return self._before + b'"choices": [' + json.dumps(choice).encode() + b"]" + self._after


class ChatFormat(Format):
    """POST /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, choices: int) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(
            self._event({"index": index, "delta": first, "logprobs": None, "finish_reason": None}) for index in range(choices)
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        if not delta.entries and delta.finish is None:
            content = json.dumps(delta.text)
            text = (
                f'"choices": [{{"index": {index}, "delta": {{"content": {content}}}, "logprobs": null, "finish_reason": null}}]'
            )
            return self._before + text.encode() + self._after
        logprobs = self._logprobs(delta.entries) if delta.entries else None
        event = b""
        if delta.text or delta.entries:
            content_delta = {"content": delta.text}
            event = self._event({"index": index, "delta": content_delta, "logprobs": logprobs, "finish_reason": None})
        if delta.finish is not None:
            event += self._event({"index": index, "delta": {}, "logprobs": None, "finish_reason": delta.finish.value})
        return event

    def choice(self, index: int, whole: Whole) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(whole.text), "refusal": None},
            "logprobs": None if self._head.alternatives is None else self._logprobs(whole.entries),
            "finish_reason": whole.finish.value if whole.finish else None,
        }

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenEntry) -> dict[str, Any]:
        top = [self._token(alternative.token_id, alternative.logprob) for alternative in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.token_text(token_id)
        whole_characters = "\ufffd" not in text
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole_characters else None}


class CompletionFormat(Format):
    """POST /v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def delta(self, index: int, delta: Delta) -> bytes:
        if not delta.entries and delta.finish is None:
            content = json.dumps(delta.text)
            text = f'"choices": [{{"index": {index}, "text": {content}, "logprobs": null, "finish_reason": null}}]'
            return self._before + text.encode() + self._after
        return self._event(
            {
                "index": index,
                "text": delta.text,
                "logprobs": self._logprobs(delta.entries) if delta.entries else None,
                "finish_reason": delta.finish.value if delta.finish else None,
            }
        )

    def choice(self, index: int, whole: Whole) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(whole.text),
            "logprobs": None if self._head.alternatives is None else self._logprobs(whole.entries),
            "finish_reason": whole.finish.value if whole.finish else None,
        }

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return {
            "tokens": [self._tokenizer.token_text(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [entry.start_chars for entry in entries],
        }

    def _top(self, entry: TokenEntry) -> dict[str, float]:
        """The alternatives and the chosen token by their text; of two with one text the likelier stands."""
        likeliest_last = sorted(entry.top, key=lambda alternative: alternative.logprob)
        top = {self._tokenizer.token_text(entry.token_id): entry.logprob}
        return top | {self._tokenizer.token_text(alternative.token_id): alternative.logprob for alternative in likeliest_last}
