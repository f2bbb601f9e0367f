"""What tests of workers share: a real local Ray, started once, and a cluster of workers without Ray, new for each test."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.actor_doubles import Cluster


@pytest.fixture(scope="session")
def local_ray() -> Iterator[Any]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    root = str(Path(__file__).parents[2])
    environment = {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=512 * 2**20,
        runtime_env={"env_vars": environment},
    )
    yield ray
    ray.shutdown()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()
