"""What the gateway costs by itself: requests per second, streams per second, and time per streamed token, over a null engine.

The gateway runs in its own process; the load generator shares the machine's cores with it. A bare FastAPI application on the
same server is measured in turn with it, so that a busy machine slows both. Where they are installed (`peer_routers.py`), so are
sglang-router and LiteLLM's proxy in front of an echo backend.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.bench.harness import Figure, Report, at_least, at_most
from tests.bench.http_load import Load, Outcome, run_load
from tests.bench.peer_routers import VARIABLE, litellm_proxy, routers_bin, sglang_router

CONNECTIONS = 32
MANY_STREAMS = 500
SHORT_TOKENS = 32
LONG_TOKENS = 1024
ROUNDS = 3
ROUND_S = 2.0
CHAT = "/v1/chat/completions"
GATEWAY = "tests.bench.null_gateway"
BARE = "tests.bench.bare_app"
ECHO = "tests.bench.echo_backend"


@contextmanager
def serving(module: str, tokens: int, tbt_s: float = 0.0) -> Iterator[int]:
    """The port of a server in a process of its own."""
    command = [sys.executable, "-m", module, str(tokens), str(tbt_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=20)


def measure(port: int, *, stream: bool, connections: int = CONNECTIONS, duration_s: float | None = ROUND_S) -> Outcome:
    body = {"model": "null", "messages": [{"role": "user", "content": "Say something."}], "stream": stream}
    return run_load(Load("127.0.0.1", port, CHAT, body, connections, duration_s))


def alternate(tokens: int, *, stream: bool) -> tuple[list[Outcome], list[Outcome]]:
    """Rounds of the gateway and of the bare application, in turn, after a warm-up of each."""
    with serving(GATEWAY, tokens) as gateway, serving(BARE, tokens) as bare:
        for port in (gateway, bare):
            measure(port, stream=stream, duration_s=0.5)
        rounds = [(measure(gateway, stream=stream), measure(bare, stream=stream)) for _ in range(ROUNDS)]
    return [ours for ours, _ in rounds], [control for _, control in rounds]


@dataclass(frozen=True)
class Peers:
    """Rounds of the gateway and of the others, in turn."""

    ours: list[Outcome]
    sglang: list[Outcome]
    litellm: list[Outcome]


def beside_peers(tokens: int, *, stream: bool) -> Peers | None:
    """None where the peers are not installed."""
    bin_dir = routers_bin()
    if bin_dir is None:
        return None
    with ExitStack() as stack:
        gateway = stack.enter_context(serving(GATEWAY, tokens))
        backend = stack.enter_context(serving(ECHO, tokens))
        sglang = stack.enter_context(sglang_router(bin_dir, backend))
        litellm = stack.enter_context(litellm_proxy(bin_dir, backend))
        ports = (gateway, sglang, litellm)
        for port in ports:
            measure(port, stream=stream, duration_s=0.5)
        rounds = [[measure(port, stream=stream) for port in ports] for _ in range(ROUNDS)]
    ours, theirs, slow = (list(outcomes) for outcomes in zip(*rounds, strict=True))
    return Peers(ours, theirs, slow)


def peer_figures(name: str, peers: Peers | None) -> list[Figure]:
    if peers is None:
        return [Figure(f"{name}_{peer}", None, "x", note=f"{VARIABLE} is not set") for peer in ("sglang_router", "litellm")]
    p99_ratio = statistics.median(
        ours.quantile_s(0.99) / theirs.quantile_s(0.99) for ours, theirs in zip(peers.ours, peers.sglang, strict=True)
    )
    return [
        Figure(f"{name}_sglang_router", rate(peers.sglang), "requests/s", note="in front of the echo backend"),
        at_least(
            f"{name}_sglang_router_ratio", ratio(peers.ours, peers.sglang), 0.5, "x", note=f"{rate(peers.ours):,.0f} requests/s"
        ),
        at_most(f"{name}_sglang_router_p99", p99_ratio, 2.0, "x", note=f"{median_p99_ms(peers.ours):.1f} ms"),
        Figure(f"{name}_litellm", rate(peers.litellm), "requests/s", note="in front of the echo backend"),
        at_least(f"{name}_litellm_ratio", ratio(peers.ours, peers.litellm), 3.0, "x"),
    ]


def median_p99_ms(outcomes: list[Outcome]) -> float:
    return statistics.median(outcome.quantile_s(0.99) for outcome in outcomes) * 1000


def rate(outcomes: list[Outcome]) -> float:
    return statistics.median(outcome.requests_per_s for outcome in outcomes)


def ratio(ours: list[Outcome], theirs: list[Outcome]) -> float:
    """Of the requests per second, round by round: each pair ran within the same few seconds of a busy machine."""
    return statistics.median(one.requests_per_s / other.requests_per_s for one, other in zip(ours, theirs, strict=True))


def worst_p99_ms(outcomes: list[Outcome]) -> float:
    return max(outcome.quantile_s(0.99) for outcome in outcomes) * 1000


def run() -> Report:
    plain, bare_plain = alternate(1, stream=False)
    streams, bare_streams = alternate(SHORT_TOKENS, stream=True)
    plain_peers, stream_peers = beside_peers(1, stream=False), beside_peers(SHORT_TOKENS, stream=True)
    with serving(GATEWAY, LONG_TOKENS) as port:
        long = measure(port, stream=True, connections=1, duration_s=ROUND_S)
    with serving(GATEWAY, LONG_TOKENS // 16, tbt_s=0.1) as port:
        many = measure(port, stream=True, connections=MANY_STREAMS, duration_s=None)
    per_token_ms = long.quantile_s(0.5) / LONG_TOKENS * 1000
    errors = [error for outcome in (*plain, *streams, long, many) for error in outcome.errors]
    figures = [
        Figure("plain", rate(plain), "requests/s", note=f"{CONNECTIONS} connections"),
        Figure("plain_p99", worst_p99_ms(plain), "ms"),
        Figure("bare_plain", rate(bare_plain), "requests/s", note="FastAPI answering by itself"),
        at_least("plain_ratio", ratio(plain, bare_plain), 0.5, "x", note="of the bare application"),
        Figure("streams", rate(streams), "streams/s", note=f"{CONNECTIONS} connections, {SHORT_TOKENS} tokens each"),
        Figure("streams_p99", worst_p99_ms(streams), "ms"),
        Figure("bare_streams", rate(bare_streams), "streams/s", note="FastAPI answering by itself"),
        at_least("streams_ratio", ratio(streams, bare_streams), 0.5, "x", note="of the bare application"),
        *peer_figures("plain", plain_peers),
        *peer_figures("streams", stream_peers),
        at_most("per_token", per_token_ms, 0.3, "ms", note="one stream, one event a token, client included"),
        at_least("concurrent_streams", len(many.latencies_s), MANY_STREAMS, "streams", note="at 10 tokens/s each"),
        at_most("errors", len(errors), 0, "errors", note="; ".join(errors[:2])),
    ]
    return Report("gateway", figures, "python -m tests.bench gateway")
