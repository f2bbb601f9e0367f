"""Settings shared by every test."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray reads it once a process, when it is imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kill-rounds", type=int, default=1, help="how often each kill test runs")
    parser.addoption("--soak-seconds", type=float, default=20.0, help="how long the short soak goes on")
    parser.addoption("--update-golden", action="store_true", help="record the decisions in tests/golden anew")


settings.register_profile(
    "conductor", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("conductor")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether recorded decisions are to be replaced by those just made."""
    return bool(request.config.getoption("--update-golden"))
