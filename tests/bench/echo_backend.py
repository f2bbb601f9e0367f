"""The engine that the peers' routers stand in front of: answers every request with constant bytes, as fast as Python can.

`python -m tests.bench.echo_backend TOKENS TBT_S` prints its port. Raw asyncio protocols and no framework, so that what is
measured through a router is the router. A streamed answer is one event a token, each written after a turn of the event loop.
"""

from __future__ import annotations

import asyncio
import json
import sys

import httptools
import uvloop

EVENT = b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"null","choices":'
EVENT += b'[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}
WHOLE = json.dumps(
    {"id": "x", "object": "chat.completion", "created": 1, "model": "null", "choices": [CHOICE], "usage": USAGE}
).encode()
MODELS = json.dumps({"object": "list", "data": [{"id": "null", "object": "model", "owned_by": "bench"}]}).encode()
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Echo(asyncio.Protocol):
    def __init__(self, tokens: int, tbt_s: float) -> None:
        self._tokens, self._tbt_s = tokens, tbt_s
        self._body = b""
        self._url = b""
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # sglang-router tries HTTP/2 first
            self._transport.close()

    def on_message_begin(self) -> None:
        self._body = b""

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":
            self._transport.write(whole(MODELS if b"models" in self._url else b"{}"))
        elif json.loads(self._body).get("stream"):
            task = asyncio.ensure_future(self._stream())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._transport.write(whole(WHOLE))

    async def _stream(self) -> None:
        self._transport.write(STREAM_HEAD)
        for _ in range(self._tokens):
            await asyncio.sleep(self._tbt_s)
            self._transport.write(chunk(EVENT))
        self._transport.write(chunk(DONE) + b"0\r\n\r\n")


async def serve(tokens: int, tbt_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Echo(tokens, tbt_s), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2])))
