"""Every command that the README shows, as it shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.served import ROOT, Served

pytestmark = [pytest.mark.live, pytest.mark.slow]

COMMANDS = [
    line[2:]
    for block in re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    for line in block.splitlines()
    if line.startswith("$ ") and not line.startswith("$ make ")  # `make` is what runs this test
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_works(command: str, directory: Path, served: Served) -> None:
    """Exit code 0, one after the other in one directory, against the live service."""
    shims = directory / "bin"
    shims.mkdir(exist_ok=True)
    (shims / "conductor").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m conductor "$@"\n')
    (shims / "conductor").chmod(0o755)
    environment = {**os.environ, "PATH": f"{shims}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    here = command.replace("localhost:8000", f"127.0.0.1:{served.port}")
    done = subprocess.run(here, shell=True, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
