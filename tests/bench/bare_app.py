"""The control of the gateway benchmark: a FastAPI application that answers by itself, on the same server settings.

`python -m tests.bench.bare_app TOKENS TBT_S` prints its port. It reads the body and answers with constant bytes, streamed one
event a token, so it is the least that a gateway on this stack can cost.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from conductor.gateway.server import bind

EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]}\n\n'
WHOLE = b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}]}'


def bare_app(tokens: int, tbt_s: float) -> FastAPI:
    app = FastAPI()

    async def events() -> AsyncIterator[bytes]:
        for _ in range(tokens):
            await asyncio.sleep(tbt_s)
            yield EVENT

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = json.loads(await request.body())
        if body["stream"]:
            return StreamingResponse(events(), media_type="text/event-stream")
        return Response(WHOLE, media_type="application/json")

    return app


def main() -> None:
    listener = bind("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    app = bare_app(int(sys.argv[1]), float(sys.argv[2]))
    config = uvicorn.Config(app, loop="uvloop", http="httptools", access_log=False, log_config=None)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
