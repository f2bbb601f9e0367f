"""Every error that a client can see, in the OpenAI shape `{"error": {message, type, param, code}}`.

`ApiError` is the one exception of the gateway; this module decides status, words and headers. A `Rejection` of the
scheduler becomes 429 with `Retry-After` (503 when a whole role has no worker) and keeps its numbers machine-readable under
`error.rejection`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from conductor.core.types import Rejection, RejectReason

MAX_SHOWN_CHARS = 120
UNAVAILABLE_REASONS = frozenset({RejectReason.NO_PREFILL, RejectReason.NO_DECODE})
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
DECISION_ID_HEADER = "x-conductor-decision-id"


class ApiError(Exception):
    """An answer other than 200. `details` are added to the error object."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.details = dict(details or {})

    def error(self) -> dict[str, Any]:
        """The value of the `error` key."""
        return {
            "message": self.message,
            "type": error_type(self.status),
            "param": self.param,
            "code": self.code,
            **self.details,
        }

    def body(self) -> bytes:
        return json.dumps({"error": self.error()}, ensure_ascii=False).encode("utf-8", errors="replace")


def error_type(status: int) -> str:
    return ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def shown(value: object) -> str:
    """A value as an error message may quote it: short, on one line, never a dump of the client's prompt."""
    text = json.dumps(value[: MAX_SHOWN_CHARS + 1] if isinstance(value, str) else value, default=repr)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def invalid(param: str, value: object, allowed: str, code: str = "invalid_value") -> ApiError:
    """400 that names the field, the value, and what is allowed."""
    return ApiError(400, f"'{param}' is {shown(value)}; allowed: {allowed}", code, param=param)


def retry_after(seconds: float) -> dict[str, str]:
    """HTTP counts whole seconds; never tell a client to come back at once."""
    bounded = min(max(seconds, 1.0), 3600.0) if math.isfinite(seconds) else 3600.0
    return {"retry-after": str(math.ceil(bounded))}


def unavailable(message: str, code: str, retry_after_s: float) -> ApiError:
    return ApiError(503, message, code, headers=retry_after(retry_after_s), details={"retry_after_s": retry_after_s})


def from_rejection(rejection: Rejection) -> ApiError:
    """The answer to a request that the scheduler refused."""
    if rejection.reason is RejectReason.TOO_LONG:
        return ApiError(
            400, rejection.message, rejection.reason.value, param="prompt", headers=decision_id(rejection.request_id)
        )
    details = {key: value for key, value in asdict(rejection).items() if key not in {"message", "request_id"}}
    details["reason"] = rejection.reason.value
    return ApiError(
        503 if rejection.reason in UNAVAILABLE_REASONS else 429,
        rejection.message,
        rejection.reason.value,
        headers={**retry_after(rejection.retry_after_s), **decision_id(rejection.request_id)},
        details={"decision_id": rejection.request_id, "rejection": finite(details)},
    )


def finite(details: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a predicted time without bound is null."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in details.items()}


def decision_id(request_id: str) -> dict[str, str]:
    return {DECISION_ID_HEADER: request_id}
