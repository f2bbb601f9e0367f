"""What an operator may do to a running gateway: look at the tenants, read the keys file again, drain.

An application of its own on an address and port of its own, with a key of its own: nothing here can be reached through the
public port, whatever path a client makes up, and no tenant's key opens it.

    GET  /dashboard       the page; it has no secrets, and asks for the operator's key to show anything
    GET  /admin/tenants   limits and use of every tenant
    POST /admin/reload    read the keys file now; 400 with the reason when it cannot be used
    POST /admin/drain     finish what is in flight, refuse the rest, then end
    /admin/cache...       look at the workers' caches, pin, drop, verify: `admin_cache.py`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from conductor.gateway.access import bearer_key, unauthorized
from conductor.gateway.account import Account
from conductor.gateway.admin_cache import cache_routes
from conductor.gateway.answers import error_response, on_route_error
from conductor.gateway.dashboard import PAGE_PATH, dashboard_routes
from conductor.gateway.errors import ApiError
from conductor.gateway.keys import KeysError, matches
from conductor.gateway.responses import send_error
from conductor.gateway.service import Service


def admin_app(service: Service, key_hash: str, drain: Callable[[], None]) -> ASGIApp:
    """`key_hash` is what `conductor key new` prints for the operator's key."""

    async def tenants(_: Request) -> Response:
        return JSONResponse({"tenants": [usage(account) for account in service.access.accounts]})

    async def reload(_: Request) -> Response:
        try:
            service.access.reload()
        except KeysError as problem:
            raise ApiError(400, str(problem), "keys_file_refused") from None
        keyring = service.access.keyring
        return JSONResponse({"tenants": len(service.access.accounts), "keys": len(keyring) if keyring else 0})

    async def start_drain(_: Request) -> Response:
        drain()
        return JSONResponse({"status": "draining", "in_flight": service.in_flight}, 202)

    routes = [
        Route("/admin/tenants", tenants, methods=["GET"]),
        Route("/admin/reload", reload, methods=["POST"]),
        Route("/admin/drain", start_drain, methods=["POST"]),
        *dashboard_routes(service),
        *cache_routes(service),
    ]
    handlers: dict[Any, Any] = {ApiError: error_response, HTTPException: on_route_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return OperatorsOnly(app, key_hash)


class OperatorsOnly:
    """ASGI application that lets in who has the operator's key, whatever is asked for but the dashboard's empty page: a browser
    cannot send a key before there is a page that asks for it."""

    def __init__(self, app: ASGIApp, key_hash: str) -> None:
        self._app = app
        self._key_hash = key_hash

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] != PAGE_PATH and not matches(bearer_key(scope["headers"]), self._key_hash):
                raise unauthorized("this is not the operator's key", "invalid_admin_key")
        except ApiError as problem:
            await send_error(send, problem)
        else:
            await self._app(scope, receive, send)


def usage(account: Account) -> dict[str, Any]:
    tenant = account.tenant
    return {
        "name": tenant.name,
        "keys": tenant.keys,
        "disabled": tenant.disabled,
        "weight": tenant.weight,
        "sharing_group": tenant.sharing_group,
        "tokens_per_s": tenant.tokens_per_s,
        "burst_tokens": tenant.burst_tokens,
        "left_tokens": account.level_tokens,
        "max_in_flight": tenant.max_in_flight,
        "in_flight": account.in_flight,
        "waiting": account.waiting,
    }
