"""The soak in small, for as long as `--soak-seconds` says; the long form is `python -m tests.bench soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.soak import soak

pytestmark = [pytest.mark.live, pytest.mark.slow]


async def test_conversations_survive_kills_on_tiers_that_are_too_small(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """No wrong answer, no lost request, nothing held when it is quiet and nothing left behind, while everything evicts."""
    outcome = await soak(tmp_path, request.config.getoption("--soak-seconds"), seed=1)
    lost = {how: count for how, count in outcome.ended.items() if how.startswith(("failed", "cancelled"))}
    assert (outcome.wrong, lost, outcome.left) == ([], {}, [])
    assert outcome.held.total() == 0, outcome.held
    assert outcome.ended["finished"] > 0
    assert outcome.ended["left"] > 0
    assert outcome.reused_tokens > 0
    assert outcome.segments == 1
    assert outcome.killed.total() >= 1
    assert len(outcome.evicted) == len(("host", "disk", "shared"))
    assert min(outcome.evicted.values()) > 0
