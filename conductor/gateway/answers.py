"""Exceptions as answers, for applications whose routes starlette finds: every error has the OpenAI shape."""

from __future__ import annotations

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from conductor.gateway.errors import ApiError
from conductor.gateway.responses import JSON

ROUTE_CODES = {404: "unknown_route", 405: "method_not_allowed"}


async def error_response(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, ApiError)
    return Response(problem.body(), problem.status, problem.headers, media_type=JSON)


async def on_route_error(request: Request, problem: Exception) -> Response:
    """Unknown paths and methods, as the router finds them."""
    assert isinstance(problem, HTTPException)
    phrase = HTTPStatus(problem.status_code).phrase.lower()
    allowed = (problem.headers or {}).get("Allow")
    message = f"{request.method} {request.url.path}: {phrase}" + (f"; allowed: {allowed}" if allowed else "")
    code = ROUTE_CODES.get(problem.status_code, "invalid_request")
    return await error_response(request, ApiError(problem.status_code, message, code, headers=problem.headers))
