"""The HTML report: one file that needs no network, with the figures, the plots and the full JSON inside."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from traces.outcomes import RunResult
from traces.plots import plots
from traces.report import DISTRIBUTIONS, figures

TEMPLATE = "report_template.html"


def write_html(run: RunResult, summary: Mapping[str, object], path: Path) -> None:
    """Write the report of `run` to `path`."""
    path.write_text(render_html(run, summary), encoding="utf-8")


def render_html(run: RunResult, summary: Mapping[str, object]) -> str:
    environment = Environment(loader=PackageLoader("traces", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    latencies = [(label, summary[key]) for label, key in DISTRIBUTIONS if summary[key] is not None]
    return environment.get_template(TEMPLATE).render(
        summary=summary,
        latencies=latencies,
        figures=figures(summary),
        plots=[(title, Markup(svg)) for title, svg in plots(run)],  # our own drawing: labels hold no input text
        data=json.dumps(summary, indent=2),
    )
