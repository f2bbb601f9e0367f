"""What the driver makes of a worker's reports on its tiers, and of questions that go to every worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from conductor.core.events import LoadReported
from conductor.core.types import Tier, TierReport, WorkerLoad
from conductor.worker_calls import Worker, WorkerCalls
from tests.conductor.doubles import spec


def report(failure: str | None) -> LoadReported:
    disk = TierReport(tier=Tier.DISK, blocks=7, quarantined=2, failure=failure)
    return LoadReported("p0", 1, WorkerLoad(queued_requests=3), (disk,))


def test_a_tier_that_begins_to_fail_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """In the log when it begins, in the figures for as long as it lasts."""
    worker = Worker(spec("p0"), 1, handle=None, joined_s=0.0)
    for _ in range(3):
        worker.hear(report("the disk does not take KV"))
    assert caplog.text.count("the disk does not take KV") == 1
    figures = worker.describe()
    assert (figures["queued_requests"], figures["disk_blocks"], figures["disk_quarantined"]) == (3, 7, 2)
    assert (figures["disk_failed"], figures["disk_failure"]) == (1, "the disk does not take KV")
    worker.hear(report(None))
    assert (worker.describe()["disk_failed"], worker.describe()["disk_failure"]) == (0, None)


class Handle:
    """Answers a call, or raises."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def ask(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    @property
    def alive(self) -> Any:
        class Never:
            def remote(self) -> Any:
                return asyncio.Event().wait()

        return Never()


async def test_everybody_is_asked_and_a_silent_worker_is_named() -> None:
    calls = WorkerCalls(lambda event: None, lambda error: False)
    calls.add(Worker(spec("p1"), 1, Handle(ValueError("no")), 0.0))
    calls.add(Worker(spec("p0"), 1, Handle({"host": 4}), 0.0))
    answers = await calls.ask_everybody(lambda handle: handle.ask())
    assert answers == {"p0": {"host": 4}, "p1": {"error": "ValueError: no"}}
    await calls.stop()
