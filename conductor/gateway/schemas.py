"""The OpenAI request bodies as this gateway takes them.

Types are strict. A field is either supported, or named here and refused unless its value is neutral, or unknown and then
refused with the list of known ones: nothing is silently ignored. `user`, `metadata` and `safety_identifier` identify the
caller to the caller's own bookkeeping; they are accepted and change no answer. `prompt_cache_key` names the session when no
`x-conductor-session` header does. `top_k`, `repetition_penalty`, `ignore_eos`
and `stop_token_ids` are the vLLM extensions of the same names.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from conductor.gateway.errors import ApiError, invalid, shown
from conductor.gateway.fields import Content, Prompts, Stops, only, refuse

MAX_ALTERNATIVES = 20
SEED_LIMIT = 2**63
Body = TypeVar("Body", bound=BaseModel)
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: Annotated[Any, only(None, False)] = None


class GenerationBody(BaseModel):
    """What completions and chat completions have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, regex_engine="rust-regex")

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)] | None = None
    stop: Stops = ()
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool = False
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = 1.0
    user: str | None = None
    logit_bias: Annotated[Any, only(None, {})] = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "'stream_options' is allowed only with 'stream': true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def output_limit(self) -> int | None:
        """The most tokens that the client wants, None for as many as fit."""
        return self.max_tokens

    @property
    def session(self) -> str | None:
        """Name of the conversation that the request belongs to."""
        return None

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report with each token; None for no log probabilities at all."""
        raise NotImplementedError


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    echo: Annotated[Any, only(None, False)] = None
    best_of: Annotated[Any, only(None, 1)] = None
    suffix: Annotated[Any, only(None, "")] = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Annotated[Any, only(None)] = None
    tool_calls: Annotated[Any, only(None, [])] = None
    function_call: Annotated[Any, only(None)] = None
    refusal: Annotated[Any, only(None)] = None
    audio: Annotated[Any, only(None)] = None

    def for_template(self) -> dict[str, str]:
        """Templates know `system`; `developer` is its later name in the OpenAI API."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    tools: Annotated[Any, only(None, [])] = None
    tool_choice: Annotated[Any, only(None, "none")] = None
    parallel_tool_calls: Annotated[Any, only(None)] = None
    functions: Annotated[Any, only(None, [])] = None
    function_call: Annotated[Any, only(None, "none")] = None
    response_format: Annotated[Any, only(None, {"type": "text"})] = None
    modalities: Annotated[Any, only(None, ["text"])] = None
    audio: Annotated[Any, only(None)] = None
    prediction: Annotated[Any, only(None)] = None
    reasoning_effort: Annotated[Any, only(None, "none")] = None
    verbosity: Annotated[Any, only(None)] = None
    web_search_options: Annotated[Any, only(None)] = None
    moderation: Annotated[Any, only(None)] = None
    store: Annotated[Any, only(None, False)] = None
    service_tier: Annotated[Any, only(None, "auto", "default")] = None
    prompt_cache_options: Annotated[Any, only(None)] = None
    prompt_cache_retention: Annotated[Any, only(None)] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("top_logprobs", "'top_logprobs' is allowed only with 'logprobs': true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise refuse("max_tokens", "'max_tokens' and 'max_completion_tokens' are allowed together only with the same value")
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def session(self) -> str | None:
        return self.prompt_cache_key

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def parse_body(schema: type[Body], raw: bytes) -> Body:
    """The body as `schema` has it; raises `ApiError` 400 that names the first bad field, its value and what is allowed."""
    try:
        return schema.model_validate_json(raw)
    except ValidationError as problem:
        raise _explain(schema, problem.errors(include_url=False, include_context=True)) from None


def _explain(schema: type[BaseModel], problems: list[ErrorDetails]) -> ApiError:
    problem = min(problems, key=lambda each: each["type"] == "extra_forbidden")
    kind, value = problem["type"], problem.get("input")
    field = ".".join(str(part) for part in problem["loc"])
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {problem['msg'].removeprefix('Invalid JSON: ')}", "invalid_json")
    if kind == "extra_forbidden":
        known = ", ".join(sorted(schema.model_fields))
        allowed = f"the fields {known}" if len(problem["loc"]) == 1 else "no such field"
        return invalid(field, value, allowed, "unknown_field")
    if kind == "missing":
        return ApiError(400, f"'{field}' is missing; it is required", "missing_field", param=field)
    if not field:
        return ApiError(400, _whole_body(problem), kind)
    return invalid(field, value, _allowed(problem["msg"]), "unsupported_value" if kind == "unsupported" else "invalid_value")


def _allowed(message: str) -> str:
    """What is allowed, of a message like "Input should be ..." or "List should have ... after validation, not 0"."""
    words = re.sub(r"^\w+ should (be|have) ", "", message)
    return words.partition(" after validation")[0]


def _whole_body(problem: ErrorDetails) -> str:
    """A complaint about several fields at once, or a body that is not even an object."""
    if problem["type"] == "model_type":
        return f"the body is {shown(problem.get('input'))}; allowed: a JSON object"
    return problem["msg"]
