"""The live driver around the edges of a request's life: cancelled while its continuation comes, and what operators ask for."""

from __future__ import annotations

import asyncio

from conductor.core import events as ev
from conductor.runtime import RequestCancelledError
from tests.conductor.doubles import job
from tests.conductor.stage import Stage


async def test_a_continuation_of_a_request_cancelled_meanwhile_is_nobody_s(stage: Stage) -> None:
    """It was in the inbox behind the cancellation: the scheduler would reserve room for it that nobody gives back."""
    await stage.runtime.submit(job())
    both = asyncio.gather(stage.runtime.cancel("r1"), stage.runtime.resume(job(attempt=2)), return_exceptions=True)
    _, resumed = await both
    await stage.settle()
    assert isinstance(resumed, RequestCancelledError)
    assert len(stage.scheduler.seen(ev.RequestCancelled)) == 1
    assert stage.scheduler.seen(ev.RequestResumed) == []


async def test_the_overview_is_of_this_moment(stage: Stage) -> None:
    before = stage.runtime._ports.clock()
    seen = await stage.runtime.overview()
    assert before <= seen["at_s"] <= stage.runtime._ports.clock()
