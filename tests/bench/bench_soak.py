"""Twenty minutes of conversations under kills, on tiers that are too small: nothing wrong, nothing lost, nothing left."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from tests.bench.harness import Figure, Report, at_least, at_most
from tests.bench.soak import Outcome, soak

SECONDS = 20 * 60.0
SEED = 5


def run(seconds: float = SECONDS) -> Report:
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        outcome = asyncio.run(soak(root, seconds, SEED))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return Report("soak", figures(outcome), "python -m tests.bench soak", {"ended": dict(outcome.ended)})


def figures(outcome: Outcome) -> list[Figure]:
    ended, killed, evicted = outcome.ended, outcome.killed, outcome.evicted
    lost = {how: count for how, count in ended.items() if how.startswith(("failed", "cancelled"))}
    return [
        Figure("finished", ended["finished"], "requests", note=", ".join(f"{how}: {n}" for how, n in ended.items())),
        at_most("wrong", len(outcome.wrong), 0, "answers", note="; ".join(outcome.wrong[:2])),
        at_most("lost", sum(lost.values()), 0, "requests", note=", ".join(lost)),
        at_least("killed", killed.total(), 1, "processes", note=", ".join(f"{name}: {n}" for name, n in killed.items())),
        Figure("reused", outcome.reused_tokens, "tokens"),
        at_least(
            "evicted", min(evicted.values(), default=0), 1, "blocks", note=", ".join(f"{t}: {n}" for t, n in evicted.items())
        ),
        at_most("held", outcome.held.total(), 0, "", note=", ".join(f"{name}: {n}" for name, n in outcome.held.items())),
        at_most("left", len(outcome.left), 0, "files", note="; ".join(outcome.left[:2])),
    ]
