"""One `conductor serve` on the real model for all live tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from tests.bench.served import Served, serve
from tests.live.observe import host_memory


@pytest.fixture(scope="session")
def log_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flight")


@pytest.fixture(scope="session")
def served(log_directory: Path) -> Iterator[Served]:
    with serve("--flight-log", str(log_directory)) as running:
        yield running
        tree, memory = running.tree(), host_memory(running)
        os.kill(running.process.pid, signal.SIGTERM)
        _, alive = psutil.wait_procs(tree, timeout=60)
        assert [process.name() for process in alive] == []
        assert memory
        assert not any(path.exists() for path in memory)


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0, timeout=120) as opened:
        yield opened
