"""A replayed trace against the live service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.served import ROOT, Served

pytestmark = [pytest.mark.live, pytest.mark.slow]


def test_a_generated_trace_replays_without_an_error(served: Served, tmp_path: Path) -> None:
    """`conductor trace generate` and `conductor replay` as the README shows them: every request completes."""
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    conductor = [sys.executable, "-m", "conductor"]
    generate = [*conductor, "trace", "generate", "conversation", str(trace), "--requests", "12", "--seed", "1"]
    replay = [*conductor, "replay", str(trace), "--url", f"http://127.0.0.1:{served.port}", "--scale", "0.01", "--speed", "2"]
    subprocess.run(generate, cwd=ROOT, check=True, capture_output=True)
    done = subprocess.run([*replay, "--json", str(report)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(report.read_text())
    assert (figures["requests"], figures["completed"], figures["failed"]) == (12, 12, {})
