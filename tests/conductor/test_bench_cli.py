"""`conductor bench`, from a checkout and from elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conductor", "bench", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_an_unknown_benchmark_is_named_with_those_that_there_are() -> None:
    done = bench(ROOT, "no_such_one")
    assert done.returncode == 2
    assert "no benchmark no_such_one" in done.stderr
    assert "decision" in done.stderr.split("choose from:")[1]


def test_outside_of_a_checkout_it_says_where_it_runs(tmp_path: Path) -> None:
    done = bench(tmp_path, "decision")
    assert (done.returncode, str(tmp_path) in done.stderr.replace("\n", "")) == (2, True)
