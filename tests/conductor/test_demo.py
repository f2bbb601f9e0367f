"""What the demonstration of copies makes of what it saw: it says so when there was nothing to be seen."""

from __future__ import annotations

from typing import Any

import pytest

from conductor.cluster_commands import _show, _summary
from conductor.config import Config
from conductor.core.types import Placement, ReusePlan, TTFTEstimate
from conductor.demo import REPLICATION, Answer, Migration, Phase, _configured

PLACED = Placement("demo-1", 1, "prefill-1", "decode-0", ReusePlan(), TTFTEstimate(0, 0, 1, 1, 1, True), None)


def record(*, pull_tokens: int, fetched_tokens: int) -> dict[str, Any]:
    """A decision for a worker that could have pulled, and did or did not."""
    chosen = {"worker": "prefill-1", "chosen": True, "prefill_s": 2.0, "pull_s": 19.0, "pull_tokens": pull_tokens}
    chosen |= {"fetched_tokens": fetched_tokens}
    reuse = {"fetched_tokens": fetched_tokens}
    return {"request_id": "demo-1", "reuse": reuse, "candidates": [{"worker": "prefill-0", "chosen": False}, chosen]}


def phase(name: str, ttft_s: float, copied_blocks: int = 0, **decided: int) -> Phase:
    shown = Phase(name, 0.5, [Answer("demo-1", ttft_s, PLACED)], copied_blocks=copied_blocks)
    shown.records.append(record(**({"pull_tokens": 0, "fetched_tokens": 0} | decided)))
    return shown


def migration(ahead_s: float = 0.3, copied_blocks: int = 16, fetched_tokens: int = 0) -> Migration:
    return Migration(
        phase("demand", 1.0, pull_tokens=1024, fetched_tokens=1024),
        phase("ahead", ahead_s, copied_blocks),
        phase("slow", 3.0, pull_tokens=1024, fetched_tokens=fetched_tokens),
    )


def test_what_was_to_be_seen_is_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """The table and the reason for computing again are printed, and the JSON holds the same."""
    shown = migration()
    assert shown.problems() == []
    _show(shown)
    printed = " ".join(capsys.readouterr().out.split())
    assert "prefill-1 computed 1024 tokens again in 2.0 s, for pulling them would have taken 19.0 s" in printed
    summary = _summary(shown)
    assert [one["pulls"] for one in summary["phases"]] == [1, 0, 0]
    assert [one["computed_again"] for one in summary["phases"]] == [0, 0, 1]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"copied_blocks": 0}, "no replica appeared"),
        ({"ahead_s": 1.2}, "TTFT p90 is 1.20 s with replication and 1.00 s without"),
        ({"fetched_tokens": 1024}, "nothing was computed again"),
    ],
)
def test_what_was_not_seen_is_said(changes: dict[str, Any], problem: str) -> None:
    """A demonstration that shows nothing fails."""
    (found,) = migration(**changes).problems()
    assert problem in found


def test_phases_differ_in_what_is_shown_only() -> None:
    """Two prefill workers that share nothing but a slowed link, and nothing refused."""
    shown = _configured(Config(), 0.5, REPLICATION)
    assert (shown.workers.prefill, shown.workers.link_gbps, shown.store.host_mib) == (2, 0.5, 0)
    assert (shown.scheduler.migration, shown.scheduler.admission) == (REPLICATION, "none")
    assert not shown.flight_log.enabled
