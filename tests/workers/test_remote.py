"""What other processes see of a worker is what it does, and costs them nothing to see."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from workers import decode, prefill, remote

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("seen", "real"), [(remote.PrefillWorker, prefill.PrefillWorker), (remote.DecodeWorker, decode.DecodeWorker)]
)
def test_every_call_of_a_worker_can_be_made_from_afar(seen: type, real: type) -> None:
    for kind in (inspect.iscoroutinefunction, inspect.isasyncgenfunction):
        calls, meant = (
            {name for name, _ in inspect.getmembers(each, kind) if not name.startswith("_")} for each in (seen, real)
        )
        assert calls == meant


def test_whoever_only_calls_workers_loads_no_torch() -> None:
    """The Conductor and the gateway: the modules of the live path and the classes of the handles that they are given."""
    check = "import sys, workers.remote, conductor.cluster, conductor.ray_engine_client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False, timeout=60).returncode == 0
