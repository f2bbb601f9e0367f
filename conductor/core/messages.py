"""Values that cross processes on the data path. The scheduler never reads them; they live here because gateway, runtime
and workers all speak them and only the core may be imported by all three.
"""

from __future__ import annotations

from dataclasses import dataclass

from conductor.core.types import FinishReason, Request, RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens. `temperature == 0` is greedy. Random draws depend on (`seed`, position) alone, so that a request
    placed again after a lost worker continues as it would have."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # how many alternatives to report with each token; 0 is the chosen token alone
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One request with its content. `tokens` is the prompt as little-endian int32, including output already emitted
    (`request.emitted_tokens` of them at the end) when the request goes on after a lost worker. `channel` names the gateway
    that its output goes to."""

    request: Request
    tokens: bytes
    sampling: SamplingParams
    channel: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One token of a request's output. `index` counts from 0 over the whole output, across attempts; a repeated index is a
    duplicate to drop. The last output of a request carries `finish_reason`. `token_id` is None when nothing was generated
    (cancelled, failed)."""

    request_id: RequestId
    attempt: int
    index: int
    token_id: int | None
    worker: WorkerId
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    reused_tokens: int | None = None  # on the first output of an attempt
    message: str | None = None
