"""`python -m tests.bench [NAME ...] [--json FILE]`: run benchmarks, print tables, optionally write JSON."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from tests.bench import harness


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    known = f"which to run: {', '.join(harness.names())} (default: all but {', '.join(harness.LONG)})"
    parser.add_argument("names", nargs="*", metavar="NAME", help=known)
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON; '-' is standard output")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(harness.names()))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; choose from: {', '.join(harness.names())}")
    console = Console(stderr=options.json == "-", width=140)
    reports = []
    for name in options.names or harness.usual():
        report = harness.run(name)
        harness.show(report, console)
        reports.append(report)
    if options.json:
        harness.write_json(reports, options.json)
    return 0 if all(figure.holds is not False for report in reports for figure in report.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
