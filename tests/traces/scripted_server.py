"""An OpenAI-compatible completions server that follows a script: what each prompt meets is told by the prompt's length."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse


@dataclass
class Script:
    """What the server does, and what it has seen."""

    token_gap_s: float = 0.002
    reject_lengths: frozenset[int] = frozenset()
    unavailable_lengths: frozenset[int] = frozenset()
    refuse_lengths: frozenset[int] = frozenset()
    cut_lengths: frozenset[int] = frozenset()
    error_lengths: frozenset[int] = frozenset()
    silent_lengths: frozenset[int] = frozenset()
    hang_lengths: frozenset[int] = frozenset()
    predicted_ttft_ms: str | None = "4.0"
    models: tuple[dict[str, Any], ...] = ({"id": "scripted", "object": "model", "vocab_size": 50_000},)
    prefill_workers: tuple[str, ...] = ()
    late_reject_lengths: frozenset[int] = frozenset()
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0


def scripted_app(script: Script) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": list(script.models)}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        script.bodies.append(body)
        script.headers.append(dict(request.headers))
        length = len(body["prompt"])
        if length in script.reject_lengths:
            return _error(429, "ttft_slo")
        if length in script.unavailable_lengths:
            return _error(503, "no_prefill_worker")
        if length in script.refuse_lengths:
            return Response("not JSON at all", status_code=400)
        headers = {} if script.predicted_ttft_ms is None else {"x-conductor-predicted-ttft-ms": script.predicted_ttft_ms}
        if script.prefill_workers:
            headers["x-conductor-prefill-worker"] = script.prefill_workers[len(script.bodies) % len(script.prefill_workers)]
        return StreamingResponse(_stream(script, body, length), media_type="text/event-stream", headers=headers)

    return app


async def _stream(script: Script, body: dict[str, Any], length: int) -> AsyncIterator[str]:
    script.in_flight += 1
    script.most_in_flight = max(script.most_in_flight, script.in_flight)
    try:
        if length in script.hang_lengths:
            await asyncio.sleep(30)
        for index in range(0 if length in script.silent_lengths else body["max_tokens"]):
            await asyncio.sleep(script.token_gap_s)
            last = index == body["max_tokens"] - 1
            yield _event({"choices": [{"index": 0, "text": "a", "finish_reason": "length" if last else None}]})
            if length in script.late_reject_lengths:
                yield _event({"error": {"message": "full", "code": "tbt_slo", "rejection": {"reason": "tbt_slo"}}})
                break
            if length in script.cut_lengths:
                return
            if length in script.error_lengths:
                yield _event({"error": {"message": "lost", "code": "retries_exhausted"}})
                break
        details = {"cached_tokens": length // 2}
        usage = {"prompt_tokens": length, "completion_tokens": body["max_tokens"], "prompt_tokens_details": details}
        yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"
    finally:
        script.in_flight -= 1


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _error(status: int, code: str) -> JSONResponse:
    return JSONResponse({"error": {"message": "no", "type": "rejected", "code": code}}, status_code=status)


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve `app` in a thread on a free port of this host; yields its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
