"""What several tests of the live driver start from."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.conductor.stage import Stage


@pytest.fixture
def quiet() -> Iterator[None]:
    """Without the log of what tests break on purpose."""
    logger = logging.getLogger("conductor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(before)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    opened = Stage()
    await opened.open()
    yield opened
    await opened.runtime.stop()
