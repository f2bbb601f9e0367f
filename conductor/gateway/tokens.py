"""`/tokenize` and `/detokenize`, in the shapes that vLLM gave them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from conductor.gateway.body import read_body
from conductor.gateway.errors import invalid
from conductor.gateway.fields import refuse
from conductor.gateway.plan import chat_prompt, check_model
from conductor.gateway.schemas import Message, TokenId, parse_body
from conductor.gateway.served_model import ServedModel
from conductor.gateway.service import Service


class TokenizeBody(BaseModel):
    """A plain prompt or a conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refuse("prompt", "exactly one of 'prompt' and 'messages' is allowed")
        return self


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    tokens: list[TokenId]


def tokens_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        """The token ids of a prompt or a conversation."""
        raw = await read_body(request.scope, request.receive, service.settings)
        body = parse_body(TokenizeBody, raw)
        return await asyncio.to_thread(tokenized, body, service.served)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        """The text of token ids."""
        raw = await read_body(request.scope, request.receive, service.settings)
        body = parse_body(DetokenizeBody, raw)
        return await asyncio.to_thread(detokenized, body, service.served)

    return router


def tokenized(body: TokenizeBody, served: ServedModel) -> dict[str, Any]:
    if body.model is not None:
        check_model(body.model, served)
    if body.messages is not None:
        tokens = served.tokenizer.encode(chat_prompt(body.messages, served), special=False)
    else:
        tokens = served.tokenizer.encode(body.prompt or "", special=body.add_special_tokens)
    strings = [served.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": served.max_context, "tokens": tokens, "token_strs": strings}


def detokenized(body: DetokenizeBody, served: ServedModel) -> dict[str, Any]:
    if body.model is not None:
        check_model(body.model, served)
    vocab_size = served.tokenizer.vocab_size
    for token in body.tokens:
        if token >= vocab_size:
            raise invalid("tokens", token, f"token ids from 0 to {vocab_size - 1}")
    return {"prompt": served.tokenizer.decode(body.tokens, keep_special=True)}
