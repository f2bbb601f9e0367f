"""`conductor demo migration`, in small: what it is to show is there to be seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.live, pytest.mark.slow]


def test_copies_ahead_of_demand_are_seen_to_help() -> None:
    """Replicas appear before anybody asks, TTFT p90 falls, and over a slow link the prefix is computed again, for a reason."""
    command = [sys.executable, "-m", "conductor", "demo", "migration", "--prefixes", "1", "--prefix-tokens", "512", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    shown = json.loads(done.stdout)
    demand, ahead, slow = shown["phases"]
    assert (demand["copied_blocks"], slow["copied_blocks"]) == (0, 0)
    assert ahead["copied_blocks"] >= 512 // 64
    assert ahead["ttft_p90_s"] < demand["ttft_p90_s"]
    for record in shown["computed_again"]:
        chosen = next(row for row in record["candidates"] if row["chosen"])
        assert chosen["pull_s"] > chosen["prefill_s"]
