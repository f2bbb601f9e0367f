"""One streamed request to an OpenAI-compatible completions endpoint, timed token by token.

Prompts are lists of token ids, so the client needs no tokenizer. It reads reused tokens from `usage`, a refusal's reason
from the error body, and what Conductor's headers tell where there are any: the predicted TTFT and the workers. Whatever
goes wrong with a request becomes its outcome; nothing is raised but a cancellation.

Times are the client's: TTFT from the moment of sending to the first event that carries a token, gaps between such events.
A server that packs several tokens into one event shows fewer and longer gaps.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import httpx

from traces.outcomes import OutcomeStatus, RequestOutcome, mooncake_tbt_s

PREDICTED_TTFT_HEADER = "x-conductor-predicted-ttft-ms"
PREFILL_WORKER_HEADER = "x-conductor-prefill-worker"
DECODE_WORKER_HEADER = "x-conductor-decode-worker"
REFUSAL_STATUSES = (429, 503)
MS_PER_S = 1000
MAX_ERROR_BYTES = 65_536
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready to go: everything but the sending is done."""

    index: int
    due_s: float
    input_tokens: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    traffic_class: str | None = None
    warmup: bool = False

    def outcome(self, status: OutcomeStatus, **known: object) -> RequestOutcome:
        return RequestOutcome(
            index=self.index,
            due_s=self.due_s,
            input_tokens=self.input_tokens,
            status=status,
            warmup=self.warmup,
            traffic_class=self.traffic_class,
            **known,  # type: ignore[arg-type]
        )


@dataclass(slots=True)
class _Observed:
    """What has been seen of a response so far."""

    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    usage: Mapping[str, object] | None = None
    predicted_ttft_s: float | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    finished: bool = False
    error: str | None = None
    rejected: bool = False

    def timings(self, now_s: float) -> dict[str, object]:
        times = self.token_times_s
        gaps = [later - earlier for earlier, later in pairwise(times)]
        output_tokens = _count(self.usage, "completion_tokens") or len(times)
        spread_s = times[-1] - times[0] if times else 0.0
        return {
            "sent_s": self.sent_s,
            "ttft_s": times[0] - self.sent_s if times else None,
            "tbt_s": mooncake_tbt_s(gaps),
            "tpot_s": spread_s / (output_tokens - 1) if gaps and output_tokens > 1 else None,
            "e2e_s": now_s - self.sent_s,
            "output_tokens": output_tokens,
            "reused_tokens": reused_tokens(self.usage),
            "predicted_ttft_s": self.predicted_ttft_s,
            "prefill_worker": self.prefill_worker,
            "decode_worker": self.decode_worker,
        }


@dataclass(frozen=True, slots=True)
class CompletionClient:
    """Sends prepared requests over `http`, whose base URL is the server's root; `timeout_s` bounds a whole request."""

    http: httpx.AsyncClient
    clock: Clock
    timeout_s: float

    async def send(self, request: PreparedRequest) -> RequestOutcome:
        """Send now and follow the stream to its end. On cancellation the request counts as unfinished, by the caller."""
        seen = _Observed(sent_s=self.clock())
        try:
            async with asyncio.timeout(self.timeout_s):
                refusal = await self._stream(request, seen)
        except TimeoutError:
            return self._failed(request, seen, "timeout")
        except httpx.HTTPError as error:
            return self._failed(request, seen, _transport_reason(error))
        if refusal is not None:
            return self._refused(request, seen, refusal)
        if seen.error is not None or not seen.finished:
            return self._failed(request, seen, seen.error or "stream_cut")
        if not seen.token_times_s:
            return self._failed(request, seen, "no_token")
        return request.outcome(OutcomeStatus.COMPLETED, **seen.timings(self.clock()))

    async def _stream(self, request: PreparedRequest, seen: _Observed) -> tuple[int, str] | None:
        """Follow the response into `seen`. The status and reason of a response that is no stream, else None."""
        headers = {"content-type": "application/json", **request.headers}
        async with self.http.stream("POST", "/v1/completions", content=request.body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                return response.status_code, await _refusal_reason(response)
            seen.predicted_ttft_s = _predicted_ttft_s(response.headers)
            seen.prefill_worker = response.headers.get(PREFILL_WORKER_HEADER)
            seen.decode_worker = response.headers.get(DECODE_WORKER_HEADER)
            async for data in _events(response):
                self._observe(data, seen)
        return None

    def _observe(self, data: str, seen: _Observed) -> None:
        if data == "[DONE]":
            seen.finished = True
            return
        event = _json_object(data)
        if event is None:
            seen.error = seen.error or "bad_event"
            return
        if event.get("error"):
            seen.error = _error_word(event) or "stream_error"
            seen.rejected = _is_rejection(event["error"])
        if isinstance(event.get("usage"), dict):
            seen.usage = cast(Mapping[str, object], event["usage"])
        if _carries_token(event):
            seen.token_times_s.append(self.clock())

    def _failed(self, request: PreparedRequest, seen: _Observed, reason: str) -> RequestOutcome:
        """An outcome other than completed; once a token has come, the prompt was computed in vain."""
        known = seen.timings(self.clock())
        status = OutcomeStatus.REJECTED if seen.rejected else OutcomeStatus.FAILED
        if not seen.token_times_s:
            return request.outcome(status, reason=reason, **known)
        wasted_tokens = request.input_tokens - (reused_tokens(seen.usage) or 0)
        return request.outcome(status, reason=reason, wasted_prefill_tokens=wasted_tokens, **known)

    def _refused(self, request: PreparedRequest, seen: _Observed, refusal: tuple[int, str]) -> RequestOutcome:
        status_code, word = refusal
        status = OutcomeStatus.REJECTED if status_code in REFUSAL_STATUSES else OutcomeStatus.FAILED
        reason = word or f"http_{status_code}"
        return request.outcome(status, sent_s=seen.sent_s, e2e_s=self.clock() - seen.sent_s, reason=reason)


def reused_tokens(usage: Mapping[str, object] | None) -> int | None:
    """Prompt tokens that came from a cache, as `usage` tells it: OpenAI's field, else DeepSeek's; None when untold."""
    if usage is None:
        return None
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        cached = _count(details, "cached_tokens")
        if cached is not None:
            return cached
    return _count(usage, "prompt_cache_hit_tokens")


def _count(values: Mapping[str, object] | None, name: str) -> int | None:
    value = None if values is None else values.get(name)
    return value if type(value) is int and value >= 0 else None


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line[len("data:") :].strip()


def _carries_token(event: Mapping[str, object]) -> bool:
    """A choice with text, or one without text that does not just tell the end (a token that makes no whole character)."""
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return False
    return bool(choices[0].get("text")) or choices[0].get("finish_reason") is None


async def _refusal_reason(response: httpx.Response) -> str:
    """The machine-readable word of an error body; empty when there is none."""
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_ERROR_BYTES:
            return ""
    value = _json_object(body.decode("utf-8", "replace"))
    return "" if value is None else _error_word(value)


def _error_word(body: Mapping[str, object]) -> str:
    error = body.get("error")
    if not isinstance(error, dict):
        return ""
    words = (error.get(name) for name in ("reason", "code", "type"))
    return next((word for word in words if isinstance(word, str) and word), "")


def _is_rejection(error: object) -> bool:
    """An error event of a request that was refused after its stream had begun."""
    return isinstance(error, dict) and ("rejection" in error or error.get("type") == "rate_limit_error")


def _predicted_ttft_s(headers: httpx.Headers) -> float | None:
    try:
        return float(headers[PREDICTED_TTFT_HEADER]) / MS_PER_S
    except (KeyError, ValueError):
        return None


def _json_object(text: str) -> dict[str, object] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _transport_reason(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "connect"
    if isinstance(error, httpx.TimeoutException):
        return "timeout"
    return "stream_cut"
