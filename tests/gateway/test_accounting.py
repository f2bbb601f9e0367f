"""The short form of the accounting run: overload, clients that leave, killed workers, and nothing left over.

The long form is `python -m tests.bench accounting`.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.bench.accounting import run, stand_in_gateway

REQUESTS = 600
CONNECTIONS = 400  # far more than the gateway has places for


@pytest.mark.slow
def test_every_request_ends_exactly_once_and_nothing_is_left_over() -> None:
    """Two workers are killed in the middle of their work, one in five clients leaves, and some requests find no room."""
    with stand_in_gateway() as process:
        ran = asyncio.run(run(process, REQUESTS, warm_up=50, connections=CONNECTIONS, kills=["decode-0", "prefill-2"]))
    counts = ran.verdicts.counts
    assert ran.verdicts.wrong == []
    assert sum(counts.values()) == REQUESTS
    assert counts["left"] > 0.1 * REQUESTS
    assert counts["finished"] > 0.7 * REQUESTS
    assert sum(ran.verdicts.refusals.values()) > 0
    assert [one["killed"] for one in ran.killed] == ["decode-0", "prefill-2"]
    assert ran.killed[0]["running"] > 0
    assert ran.after["held"] == dict.fromkeys(ran.after["held"], 0)
    assert ran.ended["finished"] >= counts["finished"]  # some clients left when all was done
    assert ran.ended["failed"] == counts.total() - counts["finished"] - counts["left"] == 0
