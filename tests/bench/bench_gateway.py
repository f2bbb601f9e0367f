"""What the gateway costs by itself: requests per second, streams per second, and time per streamed token, over a null engine.

The gateway runs in its own process; the load generator shares the machine's cores with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.bench.harness import Figure, Report, at_least, at_most
from tests.bench.http_load import Load, Outcome, run_load

CONNECTIONS = 32
MANY_STREAMS = 500
SHORT_TOKENS = 32
LONG_TOKENS = 1024
DURATION_S = 5.0
CHAT = "/v1/chat/completions"


@contextmanager
def null_gateway(tokens: int, tbt_s: float = 0.0) -> Iterator[int]:
    """The port of a gateway over a null engine."""
    command = [sys.executable, "-m", "tests.bench.null_gateway", str(tokens), str(tbt_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=20)


def measure(port: int, *, stream: bool, connections: int, duration_s: float | None) -> Outcome:
    body = {"model": "null", "messages": [{"role": "user", "content": "Say something."}], "stream": stream}
    return run_load(Load("127.0.0.1", port, CHAT, body, connections, duration_s))


def run() -> Report:
    with null_gateway(1) as port:
        measure(port, stream=False, connections=CONNECTIONS, duration_s=1.0)
        plain = measure(port, stream=False, connections=CONNECTIONS, duration_s=DURATION_S)
    with null_gateway(SHORT_TOKENS) as port:
        measure(port, stream=True, connections=CONNECTIONS, duration_s=1.0)
        streams = measure(port, stream=True, connections=CONNECTIONS, duration_s=DURATION_S)
    with null_gateway(LONG_TOKENS) as port:
        long = measure(port, stream=True, connections=1, duration_s=DURATION_S)
    with null_gateway(LONG_TOKENS // 16, tbt_s=0.1) as port:
        many = measure(port, stream=True, connections=MANY_STREAMS, duration_s=None)
    per_token_ms = long.quantile_s(0.5) / LONG_TOKENS * 1000
    errors = plain.errors + streams.errors + long.errors + many.errors
    figures = [
        Figure("plain", plain.requests_per_s, "requests/s", note=f"{CONNECTIONS} connections"),
        Figure("plain_p99", plain.quantile_s(0.99) * 1000, "ms"),
        Figure("streams", streams.requests_per_s, "streams/s", note=f"{CONNECTIONS} connections, {SHORT_TOKENS} tokens each"),
        Figure("streams_p99", streams.quantile_s(0.99) * 1000, "ms"),
        at_most("per_token", per_token_ms, 0.3, "ms", note="one stream, one event a token, client included"),
        at_least("concurrent_streams", len(many.latencies_s), MANY_STREAMS, "streams", note="at 10 tokens/s each"),
        at_most("errors", len(errors), 0, "errors", note="; ".join(errors[:2])),
    ]
    return Report("gateway", figures, "python -m tests.bench gateway")
