"""When the cluster may be asked for work: a worker of each role, and the caches known of whoever was there in the beginning."""

from __future__ import annotations

import pytest

from conductor.core.types import Role
from conductor.readiness import FIRST_SNAPSHOT_WAIT_S, Readiness
from conductor.worker_calls import Worker
from tests.conductor.doubles import spec
from tests.conductor.stage import Stage

P0, P1, D0 = (
    Worker(spec(name, role), 1, None, joined_s)
    for name, role, joined_s in (("p0", Role.PREFILL, 0.0), ("p1", Role.PREFILL, 4.0), ("d0", Role.DECODE, 1.0))
)


def test_it_takes_the_first_snapshot_of_everybody() -> None:
    """Who has joined at once is waited for together, and named."""
    readiness = Readiness()
    assert readiness.hindrance((P0, P1), {"p0"}, 2.0) == "no decode worker"
    assert readiness.hindrance((P1, P0, D0), {"p1", "p0"}, 5.0) == "no snapshot yet of the cache of p0, p1"
    assert readiness.hindrance((P0, P1, D0), {"p1"}, 6.0) == "no snapshot yet of the cache of p1"
    assert readiness.hindrance((P0, P1, D0), set(), 7.0) is None


def test_nobody_is_waited_for_for_ever() -> None:
    """From when it joined; and not at all when it leaves."""
    readiness = Readiness()
    assert readiness.hindrance((P0, P1, D0), {"p0", "p1"}, FIRST_SNAPSHOT_WAIT_S) == "no snapshot yet of the cache of p1"
    assert readiness.hindrance((P0, P1, D0), {"p0", "p1"}, P1.joined_s + FIRST_SNAPSHOT_WAIT_S) is None
    leaving = Worker(spec("p9"), 1, None, 0.0, draining=True)
    assert Readiness().hindrance((P0, D0, leaving), {"p9"}, 1.0) is None


def test_a_worker_that_joins_a_cluster_that_serves_does_not_stop_it() -> None:
    """A missing role does; then the next one to come serves at once, for there is nothing else to go by."""
    readiness = Readiness()
    assert readiness.hindrance((P0, D0), set(), 2.0) is None
    assert readiness.hindrance((P0, P1, D0), {"p1"}, 4.0) is None
    assert readiness.hindrance((P0, P1), set(), 5.0) == "no decode worker"
    assert readiness.hindrance((P0, P1, D0), {"d0"}, 6.0) is None


@pytest.mark.usefixtures("quiet")
async def test_the_status_tells_what_is_waited_for(stage: Stage) -> None:
    """Until the scheduler has taken it in."""
    stage.scheduler.unknown = {"p0"}
    status = await stage.runtime.status()
    assert (status.ready, status.reason) == (False, "no snapshot yet of the cache of p0")
    stage.scheduler.unknown = set()
    assert (await stage.runtime.status()).ready
