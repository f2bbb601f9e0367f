"""Ten thousand requests of mixed size under overload, a fifth of whose clients leave, with two workers killed.

Everything from socket to scheduler is real; the workers compute nothing and run in the same process (`stand_in_gateway.py`).
Memory is compared after a warm-up in which bounded records have reached their bounds: what is resident, which is what a machine
must have, and what is in use, which tells a leak from what the allocator has not given back.
"""

from __future__ import annotations

import asyncio

from conductor.core.bookings import EXPECTATION_GRACE_S
from tests.bench import accounting
from tests.bench.harness import Figure, Report, at_least, at_most

REQUESTS = 10_000
WARM_UP = 8_000
CONNECTIONS = 200
REST_S = EXPECTATION_GRACE_S + 3.0
KILLS = ["decode-1", "prefill-2"]


def memory_growth(name: str, growth: float) -> Figure:
    return at_most(name, 100 * max(0.0, growth), 5.0, "%", note=f"between {WARM_UP:,} warm-up requests and the end")


def run() -> Report:
    with accounting.stand_in_gateway() as process:
        ran = asyncio.run(
            accounting.run(process, REQUESTS, warm_up=WARM_UP, connections=CONNECTIONS, kills=KILLS, rest_s=REST_S)
        )
    counts = ran.verdicts.counts
    failed = sum(count for name, count in counts.items() if name.startswith("failed"))
    interrupted = sum(one["running"] for one in ran.killed)
    figures = [
        at_least("ended", sum(counts.values()), REQUESTS, "requests", note="each exactly once"),
        Figure("finished", counts["finished"], "requests", note="with the right text, once, and the right usage"),
        Figure("left", counts["left"], "requests", note="their clients closed the connection"),
        Figure("refused", ran.verdicts.refusals.total(), "times", note=", ".join(sorted(ran.verdicts.refusals))),
        Figure("failed", failed, "requests", note="after their stream had begun, with a reason"),
        at_most("wrong", len(ran.verdicts.wrong), 0, "requests", note="; ".join(ran.verdicts.wrong[:2])),
        at_least("interrupted", interrupted, 1, "requests", note=f"ran on {', '.join(KILLS)} when they were killed"),
        at_most(
            "left_over", sum(ran.after["held"].values()), 0, "", note="requests, turns, reservations, jobs held at the end"
        ),
        memory_growth("memory_growth", ran.growth("resident_bytes")),
        memory_growth("memory_used_growth", ran.growth("used_bytes")),
        Figure("memory", ran.after["resident_bytes"] / 2**20, "MiB"),
    ]
    return Report("accounting", figures, "python -m tests.bench accounting", {"verdicts": dict(counts), "sums": ran.after})
