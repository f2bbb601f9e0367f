"""What was measured of links replaces what profiles say of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conductor.core.cluster_view import ClusterView
from conductor.core.events import LinkMeasured
from conductor.core.prefix_index import PrefixIndex
from conductor.core.types import Role
from tests.core.builders import worker

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
