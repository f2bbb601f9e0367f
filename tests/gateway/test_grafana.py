"""The Grafana dashboard asks for nothing that a gateway does not export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conductor.core.types import RejectReason, WorkerLoad
from conductor.engine_client import ClusterStatus
from conductor.runtime import Counters
from tests.doubles.scripted_engine import Script
from tests.gateway.conftest import Live, StartGateway

DASHBOARD = Path(__file__).parents[2] / "conductor" / "deploy" / "grafana.json"
BY_LABELS = re.compile(r"by \(([a-z, ]+)\)")


def expressions() -> Iterator[str]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])


@pytest.fixture
def live(start_gateway: StartGateway) -> Live:
    """A gateway that has seen an answer and a refusal, over a cluster that reports what the runtime reports."""
    live = start_gateway()
    worker = {"role": "prefill", "node": "n", "model": "m", **asdict(WorkerLoad())}
    live.engine.ready = ClusterStatus(True, "", "m", {"p0": worker}, {name: float(v) for name, v in asdict(Counters()).items()})
    live.complete()
    live.engine.script = Script(rejection=RejectReason.OVERLOAD)
    live.complete()
    return live


def test_every_metric_and_label_of_the_dashboard_is_exported(live: Live) -> None:
    exported: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(live.client.get("/metrics").text):
        for sample in family.samples:
            exported.setdefault(sample.name, set()).update(sample.labels)
    for expression in expressions():
        names = set(re.findall(r"conductor_[a-z_]+", expression))
        assert names, expression
        assert names - set(exported) == set(), expression
        wanted = {label.strip() for labels in BY_LABELS.findall(expression) for label in labels.split(",")}
        assert all(wanted <= exported[name] for name in names), expression


def test_panels_do_not_overlap_and_name_their_source() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels) == len({panel["id"] for panel in panels})
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
