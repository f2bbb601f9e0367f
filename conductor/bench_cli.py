"""`conductor bench [NAME ...]`: the benchmarks of a checkout, from its command line.

They live beside the tests (`tests/bench`), compare with peers and load what an installation does not have, so they are found in
the current folder and not in the package.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from conductor.cli import ExitCode, fail

BENCHMARKS = Path("tests") / "bench" / "__main__.py"


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Which to run; all when none is named.")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Also write JSON; '-' is standard output.")
    ] = None,
) -> None:
    """Run benchmarks of this checkout and print their figures. The exit code is 1 when one misses its bound."""
    if not BENCHMARKS.is_file():
        raise fail(f"{BENCHMARKS} is not in {Path.cwd()}; allowed: the folder of a checkout", ExitCode.BAD_INPUT)
    sys.path.insert(0, str(Path.cwd()))
    options = [] if json_file is None else ["--json", json_file]
    raise typer.Exit(import_module("tests.bench.__main__").main([*(names or []), *options]))
