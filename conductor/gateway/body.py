"""Reading a request body: bounded in size and in time, so that neither a huge nor a trickling client holds the gateway."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

from conductor.gateway.errors import ApiError
from conductor.gateway.settings import GatewaySettings

WHOLE_BODY = "conductor.whole_body"  # set in the scope of a request whose body has arrived: reading it waits for nothing


async def read_body(scope: Scope, receive: Receive, settings: GatewaySettings) -> bytes:
    """The whole body; raises `ApiError` 413 or 408."""
    declared = dict(scope["headers"]).get(b"content-length", b"")
    if declared.isdigit() and int(declared) > settings.max_body_bytes:
        raise _too_large(int(declared), settings.max_body_bytes)
    if WHOLE_BODY in scope:
        return await _read(receive, settings.max_body_bytes)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            return await _read(receive, settings.max_body_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {settings.body_timeout_s:g} s", "body_timeout") from None


async def _read(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client went away before the body was complete", "incomplete_body")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(size, limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(413, f"the body has at least {size} bytes; allowed: {limit}", "body_too_large")
