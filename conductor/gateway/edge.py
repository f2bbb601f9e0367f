"""The outermost layer: every answer is counted and carries a request id, whatever produced it; who may not come in gets no
further than this.

Plain ASGI, since buffering middleware would hide disconnects and slow down every token.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conductor.gateway.access import Access
from conductor.gateway.errors import ApiError, invalid
from conductor.gateway.responses import send_error
from conductor.metrics import GatewayMetrics

logger = logging.getLogger(__name__)
REQUEST_ID = b"x-request-id"
ACCOUNT = "conductor.account"  # where in the scope the others find whose request it is
REQUEST_ID_PATTERN = re.compile(rb"[!-~]{1,256}")
DECISIONS = "/v1/decisions/"
MODELS = "/v1/models/"
ENDPOINTS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/metrics",
        "/openapi.json",
    }
)


def endpoint_label(path: str) -> str:
    """A path as a metric label: one of a fixed set of words."""
    if path in ENDPOINTS:
        return path
    return next((prefix for prefix in (DECISIONS, MODELS) if path.startswith(prefix)), "other")


class Edge:
    """ASGI application around another; `direct` are POST endpoints that need nothing of the other's routing."""

    def __init__(self, app: ASGIApp, direct: Mapping[str, ASGIApp], access: Access, metrics: GatewayMetrics) -> None:
        self._app = app
        self._direct = direct
        self._access = access
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == REQUEST_ID), None)
        well_formed = given is None or REQUEST_ID_PATTERN.fullmatch(given) is not None
        request_id = given if given is not None and well_formed else os.urandom(16).hex().encode()

        started = False

        async def counting_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._metrics.answered(endpoint_label(scope["path"]), message["status"])
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id)]
            await send(message)

        try:
            if not well_formed:
                raise bad_request_id(given or b"")
            scope[ACCOUNT] = self._access.account(scope["path"], scope["headers"])
            await self._target(scope)(scope, receive, counting_send)
        except ApiError as problem:
            await send_error(counting_send, problem)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                await send_error(counting_send, internal_error())

    def _target(self, scope: Scope) -> ASGIApp:
        return self._direct.get(scope["path"], self._app) if scope["method"] == "POST" else self._app


def bad_request_id(value: bytes) -> ApiError:
    return invalid("x-request-id", value.decode("latin-1"), "1 to 256 printable ASCII characters without spaces")


def internal_error() -> ApiError:
    """A fault of ours: the log has the traceback, the client does not."""
    return ApiError(500, "internal error; the server's log has the details", "internal_error")
