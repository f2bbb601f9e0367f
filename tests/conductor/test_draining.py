"""When a worker that is drained may be stopped: not while anybody needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from conductor import draining
from conductor.core.events import TransferFinished
from conductor.core.types import Role
from conductor.draining import Drains
from conductor.worker_calls import Worker
from tests.core.builders import worker as worker_spec


class Handle:
    """Answers `stats` with what it is told to."""

    def __init__(self) -> None:
        self.figures: dict[str, int] = {}
        self.asked = 0
        self.dead = False
        self.stats = self

    def remote(self) -> Any:
        return self._answer()

    async def _answer(self) -> dict[str, int]:
        self.asked += 1
        if self.dead:
            raise ConnectionError("gone")
        return dict(self.figures)


class Scene:
    def __init__(self) -> None:
        self.handle = Handle()
        self.used = False
        self.stopped: list[Any] = []
        self.drains = Drains(self.stopped.append, lambda worker_id: self.used)
        self.task = asyncio.create_task(self.drains.finish(Worker(worker_spec("p0", Role.PREFILL), 1, self.handle, 0.0)))

    async def answers(self, count: int) -> None:
        """Wait for so many more looks at the worker."""
        wanted = self.handle.asked + count
        async with asyncio.timeout(10):
            while self.handle.asked < wanted and not self.task.done():
                await asyncio.sleep(0.001)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Scene]:
    monkeypatch.setattr(draining, "POLL_S", 0.002)
    return Scene


async def test_an_idle_worker_is_stopped_and_retired(scene: Callable[[], Scene]) -> None:
    """After it has said twice that it holds nothing."""
    drained = scene()
    await asyncio.wait_for(drained.task, 10)
    assert drained.stopped == [drained.handle]
    assert (drained.drains.retired, drained.handle.asked) == ({"p0"}, draining.IDLE_ANSWERS)


@pytest.mark.parametrize("figure", draining.BUSY_FIGURES)
async def test_a_busy_worker_goes_on(scene: Callable[[], Scene], figure: str) -> None:
    """Queued, running, pinned or on offer: each keeps it alive."""
    drained = scene()
    drained.handle.figures = {figure: 1}
    await drained.answers(5)
    assert drained.stopped == []
    drained.handle.figures = {figure: 0}
    await asyncio.wait_for(drained.task, 10)


async def test_a_worker_that_requests_are_placed_on_goes_on(scene: Callable[[], Scene]) -> None:
    """A decode worker may have nothing yet, and a prompt on its way to it."""
    drained = scene()
    drained.used = True
    await drained.answers(5)
    assert drained.stopped == []
    drained.used = False
    await asyncio.wait_for(drained.task, 10)


async def test_a_worker_that_hands_something_on_goes_on(scene: Callable[[], Scene]) -> None:
    """The copy may not have begun when it is first looked at."""
    drained = scene()
    drained.drains.transfer_began("copy-1", "p0")
    await drained.answers(5)
    assert drained.stopped == []
    drained.drains.observe(TransferFinished("copy-1", 1, 0.1))
    await asyncio.wait_for(drained.task, 10)


async def test_a_worker_that_dies_is_retired_too(scene: Callable[[], Scene]) -> None:
    """Nobody should start it again."""
    drained = scene()
    drained.handle.figures = {"running": 1}
    await drained.answers(2)
    drained.handle.dead = True
    await asyncio.wait_for(drained.task, 10)
    assert drained.drains.retired == {"p0"}
