"""The two generating endpoints, from bytes in to bytes out. Plain ASGI: the path of every token goes through here.

An endpoint differs from the other in its schema, in how its prompts become tokens, and in its format; `KINDS` holds all three.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import time
from types import MappingProxyType
from typing import Any

from starlette.types import Receive, Scope, Send

from conductor.gateway.body import read_body
from conductor.gateway.edge import ACCOUNT, TRACE
from conductor.gateway.errors import ApiError
from conductor.gateway.formats import ChatFormat, CompletionFormat, Format, Head
from conductor.gateway.generation import Run
from conductor.gateway.hints import read_hints
from conductor.gateway.plan import Origin, Plan, chat_prompt, check_model, new_id, tokenize
from conductor.gateway.responses import Answer, answer, send_error
from conductor.gateway.schemas import ChatBody, CompletionBody, GenerationBody, parse_body
from conductor.gateway.served_model import ServedModel
from conductor.gateway.service import Service
from conductor.gateway.tracing import RequestTrace


@dataclass(frozen=True, slots=True)
class Kind:
    """What makes an endpoint. `size` is what its prompts weigh (characters or tokens), `tokens` their token ids."""

    schema: type[GenerationBody]
    id_prefix: str
    format: type[Format]
    size: Callable[[Any], int]
    tokens: Callable[[Any, ServedModel], Sequence[Sequence[int]]]


def completion_tokens(body: CompletionBody, served: ServedModel) -> Sequence[Sequence[int]]:
    return [tokenize(prompt, served, special=True) for prompt in body.prompt]


def chat_tokens(body: ChatBody, served: ServedModel) -> Sequence[Sequence[int]]:
    """The template writes the special tokens itself."""
    return [served.tokenizer.encode(chat_prompt(body.messages, served), special=False)]


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "/v1/completions": Kind(
            CompletionBody,
            "cmpl",
            CompletionFormat,
            lambda body: sum(map(len, body.prompt)),
            completion_tokens,
        ),
        "/v1/chat/completions": Kind(
            ChatBody,
            "chatcmpl",
            ChatFormat,
            lambda body: sum(len(message.content) for message in body.messages),
            chat_tokens,
        ),
    }
)


class GenerateEndpoint:
    """An ASGI application for one of `KINDS`."""

    def __init__(self, service: Service, kind: Kind) -> None:
        self._service = service
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = self._service.tracing.begin(scope["path"], scope["headers"])
        if trace is not None:
            scope[TRACE] = trace.traceparent
        try:
            with self._service.slot(scope[ACCOUNT]):
                await self._generate(scope, receive, send, trace)
            if trace is not None and trace.unexplained is not None:
                trace.records = await self._service.records(trace.unexplained)
        except ApiError as problem:
            if trace is not None:
                trace.problem_status = problem.status
            await send_error(send, problem)
        finally:
            if trace is not None:
                trace.end()

    async def _generate(self, scope: Scope, receive: Receive, send: Send, trace: RequestTrace | None) -> None:
        service, account = self._service, scope[ACCOUNT]
        hints = read_hints(scope["headers"], service.settings)
        body = parse_body(self._kind.schema, await read_body(scope, receive, service.settings))
        check_model(body.model, service.served)
        origin = Origin(hints, account.tenant.name, service.engine.channel, account.tenant.sharing_group)
        plan = await self._plan(body, origin)
        run = Run(plan, service.engine, service.served.tokenizer, service.metrics)
        if trace is not None:
            trace.prepared(run)
        head = Head(plan.id, int(time()), service.served.name, body.alternatives, body.include_usage)
        writer = self._kind.format(head, service.served.tokenizer)
        turn = service.room.turn(account, plan.cost_tokens)
        account.charge(plan.prompt_tokens)
        try:
            await answer(Answer(run, writer, turn, bool(body.stream), body.include_usage, service.settings), receive, send)
        finally:
            account.charge(run.output_tokens)
            service.metrics.tenant_tokens(account.tenant.name, plan.prompt_tokens, run.output_tokens)

    async def _plan(self, body: GenerationBody, origin: Origin) -> Plan:
        """Large prompts are tokenized and hashed in a thread, so that the streams of others go on."""
        if self._kind.size(body) > self._service.settings.inline_tokenize_chars:
            return await asyncio.to_thread(self._plan_now, body, origin)
        return self._plan_now(body, origin)

    def _plan_now(self, body: GenerationBody, origin: Origin) -> Plan:
        prompts = self._kind.tokens(body, self._service.served)
        return self._service.planner.plan(new_id(self._kind.id_prefix), body, prompts, origin)
