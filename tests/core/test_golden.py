"""Decisions on three tiny traces, byte for byte as recorded in `tests/golden` (I7).

`pytest tests/core/test_golden.py --update-golden` records them anew; the difference is then to be read like any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from conductor.core.commands import Command, Reject, StartPrefill
from conductor.core.config import SchedulerConfig
from conductor.core.types import SLO, Priority, Request
from tests.core.builders import PROFILE, request
from tests.core.served import World

GOLDEN = Path(__file__).parent.parent / "golden"
Arrivals = list[tuple[float, Request]]


def system_prompt() -> Arrivals:
    """Bursts that share a system prompt of eight blocks."""
    return [(2.0 * (number // 8), request(f"r{number}", tokens=1500, shared=8)) for number in range(40)]


def conversations() -> Arrivals:
    """Four sessions with one system prompt, whose prompts grow from turn to turn."""
    return [
        (turn * 2.0 + session * 0.05, request(f"s{session}t{turn}", tokens=1500 * (turn + 1), own=session, shared=12))
        for turn in range(8)
        for session in range(4)
    ]


def overload() -> Arrivals:
    """Three times what the cluster can do, of all priorities."""
    rng = Random(7)
    return [
        (number * 0.08, request(f"r{number}", tokens=rng.choice((400, 3000, 9000)), priority=rng.choice(list(Priority))))
        for number in range(60)
    ]


CASES: dict[str, tuple[Callable[[], Arrivals], SchedulerConfig]] = {
    "system_prompt-conductor": (system_prompt, SchedulerConfig(policy="conductor")),
    "conversations-kvcache_centric": (conversations, SchedulerConfig(policy="kvcache_centric")),
    "overload-conductor": (overload, SchedulerConfig(policy="conductor", slo=SLO(ttft_s=1.5, tbt_s=0.1))),
}


def lines(name: str) -> Iterator[str]:
    """One JSON object a decision, in the order in which they were made."""
    arrivals, config = CASES[name]
    served = World(config, PROFILE, PROFILE, (3, 2)).run(arrivals())
    for now, _, commands in served.log:
        for command in commands:
            row = decision(command)
            if row is not None:
                yield json.dumps({"now_s": round(now, 6), **row}, separators=(",", ":")) + "\n"


def decision(command: Command) -> dict[str, object] | None:
    if isinstance(command, StartPrefill):
        placed = command.placement
        source = None if placed.reuse.source is None else placed.reuse.source.owner
        return {
            "request": placed.request_id,
            "prefill": placed.prefill,
            "decode": placed.decode,
            "local_tokens": placed.reuse.local_tokens,
            "fetched_tokens": placed.reuse.fetched_tokens,
            "source": source,
            "ttft_s": round(placed.ttft.total_s, 6),
            "calibrated": placed.ttft.calibrated,
        }
    if isinstance(command, Reject):
        refused = command.rejection
        shortfall_s = None if refused.shortfall_s is None else round(refused.shortfall_s, 6)
        return {"request": refused.request_id, "rejected": refused.reason, "shortfall_s": shortfall_s}
    return None


@pytest.mark.parametrize("name", CASES)
def test_decisions_are_those_recorded(name: str, update_golden: bool) -> None:
    """A change of any decision shows as a difference of a file."""
    decided, path = "".join(lines(name)), GOLDEN / f"{name}.jsonl"
    if update_golden:
        path.write_text(decided, encoding="utf-8")
    assert decided == path.read_text(encoding="utf-8")


def test_the_traces_call_for_every_kind_of_decision() -> None:
    """Reuse in place, fetching from others, and refusals all occur in the recorded decisions."""
    rows = [json.loads(line) for name in CASES for line in (GOLDEN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any(row.get("local_tokens") for row in rows)
    assert any(row.get("fetched_tokens") for row in rows)
    assert any("rejected" in row for row in rows)
