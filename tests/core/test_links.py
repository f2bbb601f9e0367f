"""What was measured of links replaces what profiles say of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conductor.core.cluster_view import ClusterView
from conductor.core.config import QueueConfig, SchedulerConfig
from conductor.core.events import LinkMeasured, RequestArrived, Tick
from conductor.core.prefix_index import PrefixIndex
from conductor.core.types import Role
from tests.core.builders import blocks, cluster, drive, request, worker

MEASURED = LinkMeasured("p1", 1, "p0", "object_store", "Ray object store", 5e8, 8e8, 0.004)


@pytest.fixture
def view() -> ClusterView:
    view = ClusterView(PrefixIndex())
    for worker_id in ("p0", "p1", "p2"):
        view.join(worker(worker_id, Role.PREFILL), 1)
    return view


def link(view: ClusterView, worker_id: str) -> tuple[float, float, float]:
    pool, row = view.prefill, view.prefill.row[worker_id]
    return float(pool.link_bytes_per_s[row]), float(pool.nic_bytes_per_s[row]), float(pool.latency_s[row])


def test_a_measurement_replaces_the_profile(view: ClusterView) -> None:
    """For the worker that fetched, and for no other."""
    before = link(view, "p2")
    view.link_measured(MEASURED, 0.0)
    assert link(view, "p1") == (5e8, 8e8, 0.004)
    assert link(view, "p2") == before
    assert view.links.describe("p1")["p0"]["protocol"] == "Ray object store"


def test_a_pair_is_believed_what_it_measured(view: ClusterView) -> None:
    """Whom nobody has fetched from yet gives what the target usually gets; a worker that joins later is reckoned too."""
    assert view.links.outbound("p0") is None
    view.link_measured(MEASURED, 0.0)
    view.link_measured(replace(MEASURED, source="p2", bytes_per_s=1e8, latency_s=0.1), 0.0)
    row = view.prefill.row["p1"]
    for source, expected in (("p0", (5e8, 0.004)), ("p2", (1e8, 0.1)), ("p9", (3e8, 0.052))):
        links = view.links.outbound(source)
        assert links is not None
        assert (float(links.bytes_per_s[row]), float(links.latency_s[row])) == pytest.approx(expected)
        assert len(links.bytes_per_s) == 3
    view.join(worker("a0", Role.PREFILL), 1)
    links = view.links.outbound("p0")
    assert links is not None
    assert len(links.bytes_per_s) == 4
    assert float(links.bytes_per_s[view.prefill.row["p1"]]) == 5e8


def test_a_worker_is_believed_its_median_link(view: ClusterView) -> None:
    """One slow peer does not make all fetching look slow."""
    for source, speed in (("p0", 5e8), ("p2", 1e6), ("p3", 4e8)):
        view.link_measured(replace(MEASURED, source=source, bytes_per_s=speed), 0.0)
    assert link(view, "p1")[0] == 4e8


@pytest.mark.parametrize(
    "wrong",
    [{"worker_id": "nobody"}, {"epoch": 2}, {"bytes_per_s": 0.0}, {"shared_bytes_per_s": 0.0}, {"latency_s": -1.0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_cannot_be_changes_nothing(view: ClusterView, wrong: dict[str, object]) -> None:
    """Unknown workers, other lives, impossible speeds."""
    before = link(view, "p1")
    view.link_measured(replace(MEASURED, **wrong), 0.0)  # type: ignore[arg-type]
    assert link(view, "p1") == before


def test_a_new_life_begins_with_its_profile(view: ClusterView) -> None:
    """What was measured of the process that is gone says nothing of the next one."""
    before = link(view, "p1")
    view.link_measured(MEASURED, 0.0)
    view.leave("p1")
    view.join(worker("p1", Role.PREFILL), 2)
    assert link(view, "p1") == before
    assert view.links.describe("p1") == {}


def test_links_into_decode_workers_are_known_and_change_no_prefill_estimate(view: ClusterView) -> None:
    """A decode worker receives hand-overs; nobody fetches a prefix into it."""
    view.join(worker("d0", Role.DECODE), 1)
    before = [link(view, name) for name in view.prefill.ids]
    view.link_measured(replace(MEASURED, worker_id="d0"), 0.0)
    assert [link(view, name) for name in view.prefill.ids] == before
    assert view.links.describe("d0")["p0"]["bytes_per_s"] == 5e8
    links = view.links.outbound("p0")
    assert links is not None
    assert links.bytes_per_s.tolist() == view.prefill.link_bytes_per_s.tolist()
    assert view.links.outbound("p0") is links, "gathered once for as long as nothing changes"


def test_a_pull_takes_as_long_as_the_measured_link_needs() -> None:
    """News of the link counts at once, for a request that has been looked at before, too."""
    driven = drive(SchedulerConfig(policy="conductor", queue=QueueConfig(burst_window_s=1.0)), cluster(prefill=2))
    driven.store("p0", blocks(60, shared=60))
    driven(RequestArrived(request("r2", tokens=6400, shared=60)))
    driven(LinkMeasured("p1", 1, "p0", "object_store", "Ray object store", 1e10, 1e10, 0.2))
    driven(Tick(), at=1.0)
    record = driven.scheduler.decision_record("r2")
    assert record is not None
    row = next(row for row in record["candidates"] if row["worker"] == "p1")
    assert row["pull_s"] == pytest.approx(0.2 + 3840 * 1e5 / 1e10)
