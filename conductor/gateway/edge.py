"""The outermost layer: every answer is counted and carries a request id, whatever produced it; who may not come in gets no
further than this.

Plain ASGI, since buffering middleware would hide disconnects and slow down every token.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conductor.gateway.errors import ApiError, invalid
from conductor.gateway.ids import unique_hex
from conductor.gateway.logs import FIELDS, current_request
from conductor.gateway.responses import send_error
from conductor.gateway.service import Service
from conductor.gateway.tracing import TRACEPARENT, TRACEPARENT_PATTERN

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("conductor.gateway.access")

ACCOUNT = "conductor.account"  # where in the scope the others find whose request it is
TRACE = "conductor.traceparent"  # where in the scope the trace context of the answer lies
REQUEST_ID = b"x-request-id"
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
        "/dashboard",
        "/dashboard/events",
    }
)


def endpoint_label(path: str) -> str:
    """A path as a metric label: one of a fixed set of words."""
    if path in ENDPOINTS:
        return path
    return next((prefix for prefix in (DECISIONS, MODELS) if path.startswith(prefix)), "other")


class Edge:
    """ASGI application around another; `direct` are POST endpoints that need nothing of the other's routing."""

    def __init__(self, app: ASGIApp, direct: Mapping[str, ASGIApp], service: Service) -> None:
        self._app = app
        self._direct = direct
        self._access = service.access
        self._metrics = service.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, send, self._metrics.answered)
        current_request.set(exchange.request_id.decode())
        try:
            if not exchange.well_formed:
                raise bad_request_id(exchange.given_id or b"")
            scope[ACCOUNT] = self._access.account(scope["path"], scope["headers"])
            await self._target(scope)(scope, receive, exchange.send)
        except ApiError as problem:
            await send_error(exchange.send, problem)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if exchange.status is None:
                await send_error(exchange.send, internal_error())
        finally:
            exchange.log()

    def _target(self, scope: Scope) -> ASGIApp:
        return self._direct.get(scope["path"], self._app) if scope["method"] == "POST" else self._app


class Exchange:
    """One request and its answer: the headers that every answer carries, and what is noted of it."""

    def __init__(self, scope: Scope, send: Send, answered: Callable[[str, int], None]) -> None:
        self._scope = scope
        self._send = send
        self._answered = answered
        self._started_s = monotonic()
        self.status: int | None = None
        self.given_id: bytes | None = None
        for name, value in scope["headers"]:
            if name == REQUEST_ID:
                self.given_id = value
            elif name == TRACEPARENT and TRACEPARENT_PATTERN.fullmatch(value):
                scope[TRACE] = value
        self.well_formed = self.given_id is None or REQUEST_ID_PATTERN.fullmatch(self.given_id) is not None
        usable = self.given_id is not None and self.well_formed
        self.request_id = self.given_id if usable and self.given_id else unique_hex().encode()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._answered(endpoint_label(self._scope["path"]), message["status"])
            headers = [*message.get("headers", ()), (REQUEST_ID, self.request_id)]
            if TRACE in self._scope:
                headers.append((TRACEPARENT, self._scope[TRACE]))
            message["headers"] = headers
        await self._send(message)

    def log(self) -> None:
        if not access_logger.isEnabledFor(logging.INFO):
            return
        account = self._scope.get(ACCOUNT)
        fields = {
            "method": self._scope["method"],
            "endpoint": endpoint_label(self._scope["path"]),
            "status": self.status,
            "seconds": round(monotonic() - self._started_s, 6),
            "tenant": account.tenant.name if account else None,
        }
        if TRACE in self._scope:
            fields["trace_id"] = self._scope[TRACE].split(b"-")[1].decode()
        access_logger.info("answered", extra={FIELDS: fields})


def bad_request_id(value: bytes) -> ApiError:
    return invalid("x-request-id", value.decode("latin-1"), "1 to 256 printable ASCII characters without spaces")


def internal_error() -> ApiError:
    """A fault of ours: the log has the traceback, the client does not."""
    return ApiError(500, "internal error; the server's log has the details", "internal_error")
