"""What an operator may do to the caches of a running cluster, part of the admin endpoints.

GET  /admin/cache                    every worker's tiers in numbers
GET  /admin/cache/ls                 prefixes, each by the hash of its last block
POST /admin/cache/{pin,unpin,drop,verify}   body {"hash": "..."}; drop and verify without a hash mean everything
"""

from __future__ import annotations

from json import JSONDecodeError
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from conductor.gateway.errors import ApiError, invalid
from conductor.gateway.service import Service

ACTIONS = ("pin", "unpin", "drop", "verify")
NEED_HASH = ("pin", "unpin")


def cache_routes(service: Service) -> list[Route]:
    async def stats(_: Request) -> Response:
        return JSONResponse({"workers": await service.cache("stats", None)})

    async def prefixes(request: Request) -> Response:
        return JSONResponse({"workers": await service.cache("ls", _hash(request.query_params.get("hash")))})

    async def act(request: Request) -> Response:
        action = request.path_params["action"]
        if action not in ACTIONS:
            raise ApiError(404, f"no cache action {action!r}; allowed: {', '.join(ACTIONS)}", "unknown_action")
        name = _hash((await _body(request)).get("hash"))
        if name is None and action in NEED_HASH:
            raise invalid("hash", None, "the hash of a prefix's last block", "hash_missing")
        return JSONResponse({"workers": await service.cache(action, name)})

    return [
        Route("/admin/cache", stats, methods=["GET"]),
        Route("/admin/cache/ls", prefixes, methods=["GET"]),
        Route("/admin/cache/{action}", act, methods=["POST"]),
    ]


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = await request.json() if await request.body() else {}
    except (JSONDecodeError, UnicodeDecodeError):
        raise ApiError(400, "the body is not JSON; allowed: an object with a hash", "invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object; allowed: an object with a hash", "invalid_json")
    return body


def _hash(text: Any) -> int | None:
    if text is None:
        return None
    try:
        return int(str(text), 16)
    except ValueError:
        raise invalid("hash", text, "hexadecimal digits", "invalid_hash") from None
