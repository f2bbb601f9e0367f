"""The dashboard: one page without any reference to another address, and the events that keep it up to date.

    GET /dashboard          the page, with its style and script inside; a content security policy allows nothing else
    GET /dashboard/events   server-sent events: one picture of gateway and cluster every `dashboard_period_s`

A picture is made once a period however many look, and not at all while nobody does. The page has no data in it and so needs
no key; where the events need one, the page asks for it and keeps it in memory. What is in a picture: `core/overview.py` for
the decisions, `ClusterStatus` for the workers, `GatewayMetrics.figures` for this gateway.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import cache
from importlib.resources import files
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from conductor.gateway.service import Service

PAGE_PATH = "/dashboard"
EVENTS_PATH = "/dashboard/events"
EVENT_STREAM = "text/event-stream; charset=utf-8"
PAGE_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}


def dashboard_routes(service: Service) -> list[Route]:
    feed = Feed(service)

    async def page(_: Request) -> Response:
        html, policy = read_page()
        return Response(html, media_type="text/html", headers={**PAGE_HEADERS, "content-security-policy": policy})

    async def events(_: Request) -> Response:
        return StreamingResponse(feed.events(), media_type=EVENT_STREAM, headers={"cache-control": "no-cache"})

    return [Route(PAGE_PATH, page, methods=["GET"]), Route(EVENTS_PATH, events, methods=["GET"])]


@cache
def read_page() -> tuple[str, str]:
    """The page with style and script in their places, and the policy that allows these two and a connection back."""
    folder = files("conductor.gateway") / "static"
    html, style, script = ((folder / f"dashboard.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    html = html.replace("/* dashboard.css */", style).replace("/* dashboard.js */", script)
    allowed = {tag: _digest(re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.S)) for tag in ("style", "script")}
    policy = (
        f"default-src 'none'; img-src data:; connect-src 'self'; style-src {allowed['style']}; script-src {allowed['script']}"
    )
    return html, f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _digest(parts: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


class Feed:
    """Mutable: the last picture, as the event that carries it, and when it was made."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._period_s = service.settings.dashboard_period_s
        self._event = b""
        self._made_s = float("-inf")
        self._making = asyncio.Lock()

    async def events(self) -> AsyncIterator[bytes]:
        """Until the server ends."""
        ended = self._service.ended
        while not ended.is_set():
            yield await self._current()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await ended.wait()

    async def _current(self) -> bytes:
        async with self._making:
            if monotonic() - self._made_s >= self._period_s / 2:
                self._event = b"data: " + json.dumps(await self._picture(), separators=(",", ":")).encode() + b"\n\n"
                self._made_s = monotonic()
            return self._event

    async def _picture(self) -> dict[str, Any]:
        service = self._service
        status, overview = await asyncio.gather(service.status(), service.overview())
        return {
            "period_s": self._period_s,
            "model": service.served.name,
            "ready": status is not None and status.ready and not service.draining,
            "reason": "draining" if service.draining else "the cluster does not answer" if status is None else status.reason,
            "gateway": service.metrics.figures(),
            "counters": {} if status is None else dict(status.counters),
            "workers": {} if status is None else dict(status.workers),
            "overview": overview,
        }
