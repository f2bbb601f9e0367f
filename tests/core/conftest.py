"""A scheduler whose invariants are checked when the test ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.builders import Drive, drive


@pytest.fixture
def scheduler() -> Iterator[Drive]:
    """Two prefill and two decode workers that have joined, placed on by `local_cache_aware`."""
    driven = drive()
    yield driven
    driven.scheduler.check()
