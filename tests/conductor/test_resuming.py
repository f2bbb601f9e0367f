"""A Conductor that is lost while it places a request again costs time, and not the request."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorUnavailableError

from conductor.core.messages import GenerationJob
from conductor.core.types import Decision, FinishReason
from conductor.notices import ResumeNotice
from tests.conductor.doubles import job, placement
from tests.conductor.test_ray_engine_client import Stage, output, stage, until

pytestmark = pytest.mark.usefixtures("quiet")
__all__ = ["stage"]


async def test_it_is_asked_again_for_the_attempt_after(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt that it was asked for may have been placed, so what still comes of it must not count."""
    monkeypatch.setattr("conductor.ray_engine_client.RECONNECT_DELAY_S", 0.001)
    asked = []

    def decide(again: GenerationJob) -> Decision:
        asked.append(again.request.attempt)
        if len(asked) < 3:
            raise ActorUnavailableError("it is being started again", None)
        return placement("r1", attempt=again.request.attempt)

    await stage.client.submit(job())
    stage.p0.outputs.put(output(0, worker="p0"))
    await stage.settle()
    stage.conductor.decide = decide
    stage.conductor.tell(ResumeNotice("r1", 1))
    await until(lambda: len(asked) == 3)
    await stage.settle()
    assert asked == [2, 3, 4]
    stale, right = output(1, attempt=2, worker="p0"), output(1, attempt=4, worker="p0", finish=FinishReason.LENGTH)
    stage.p0.outputs.put(stale, right)
    assert await stage.read() == [output(0, worker="p0"), right]


async def test_a_request_that_its_client_leaves_meanwhile_is_not_asked_for_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conductor.ray_engine_client.RECONNECT_DELAY_S", 0.01)
    asked = []

    def decide(again: GenerationJob) -> Decision:
        asked.append(again.request.attempt)
        raise ActorUnavailableError("it is being started again", None)

    await stage.client.submit(job())
    stage.conductor.decide = decide
    stage.conductor.tell(ResumeNotice("r1", 1))
    await until(lambda: len(asked) == 2)
    await stage.client.cancel("r1")
    seen = len(asked)
    await asyncio.sleep(0.2)
    assert len(asked) <= seen + 1
