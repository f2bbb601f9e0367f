"""Writing behind the work: nobody waits, blocks sink through all tiers, and what is lost on the way is counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from conductor.core.types import BlockHash, Tier
from tests.workers.kv_store.conftest import make_disk, make_host, make_shared
from tests.workers.kv_store.doubles import FaultyFiles, chain, content
from tests.workers.kv_store.test_tiers import read
from workers.kv_store.base import KVTier
from workers.kv_store.hierarchy import Hierarchy
from workers.kv_store.opening import OpenedTiers
from workers.kv_transfer.base import KVArray


class Pool:
    """A device pool that holds what it is told to. While `gate` is shut, reading it takes for ever."""

    def __init__(self) -> None:
        self.held: set[BlockHash] = set()
        self.gate = threading.Event()
        self.gate.set()

    @contextmanager
    def rows(self, names: Sequence[BlockHash], first: int) -> Iterator[list[KVArray]]:
        assert self.gate.wait(20)
        depth = next((at for at, name in enumerate(names) if name not in self.held), len(names))
        yield [content(name) for name in names[first:depth]]


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def make(pool: Pool, tmp_path: Path) -> Iterator[partial[Hierarchy]]:
    made: list[Hierarchy] = []

    def build(tiers: Sequence[KVTier], queue_blocks: int = 100) -> Hierarchy:
        made.append(Hierarchy(OpenedTiers(tuple(tiers)), pool.rows, queue_blocks))
        return made[-1]

    yield partial(build)
    pool.gate.set()
    for hierarchy in made:
        hierarchy.close()


def test_a_prefix_sinks_through_all_tiers(make: partial[Hierarchy], pool: Pool, tmp_path: Path) -> None:
    """From the pool to the first tier, and from there on, even when the pool has evicted it meanwhile."""
    tiers = [make_host(tmp_path), make_disk(tmp_path / "disk"), make_shared(tmp_path)]
    hierarchy = make(tiers)
    names = chain(0, 6)
    pool.held.update(names)
    hierarchy.keep(names, "agent", 6)
    assert hierarchy.flush(20)
    assert [read(tier, names) for tier in tiers] == [6, 6, 6]
    assert {block.traffic_class for tier in tiers for block in tier.held()} == {"agent"}
    assert [tier for tier, change in hierarchy.changes()] == [Tier.HOST, Tier.DISK, Tier.SHARED]


def test_whoever_keeps_a_prefix_never_waits(make: partial[Hierarchy], pool: Pool, tmp_path: Path) -> None:
    """The first write hangs: what comes after it is queued up to the bound, then dropped and counted."""
    hierarchy = make([make_disk(tmp_path)], queue_blocks=6)
    pool.gate.clear()
    for branch in range(3):
        pool.held.update(chain(branch, 4))
        hierarchy.keep(chain(branch, 4), "chat", 4)
    (report,) = hierarchy.reports()
    assert (report.waiting, report.dropped, report.stored) == (4, 8, 0)
    pool.gate.set()
    assert hierarchy.flush(20)
    assert (hierarchy.reports()[0].waiting, hierarchy.reports()[0].stored) == (0, 4)


def test_what_was_evicted_before_its_turn_is_counted(make: partial[Hierarchy], pool: Pool, tmp_path: Path) -> None:
    hierarchy = make([make_disk(tmp_path)])
    pool.held.update(chain(0, 2))
    hierarchy.keep(chain(0, 6), "chat", 6)
    assert hierarchy.flush(20)
    assert (hierarchy.reports()[0].stored, hierarchy.reports()[0].dropped) == (2, 4)


def test_what_was_dropped_is_written_when_it_is_used_again(make: partial[Hierarchy], pool: Pool, tmp_path: Path) -> None:
    """A later prompt names its whole prefix, so a hole does not last."""
    hierarchy = make([make_disk(tmp_path)])
    pool.held.update(chain(0, 2))
    hierarchy.keep(chain(0, 4), "chat", 4)
    assert hierarchy.flush(20)
    pool.held.update(chain(0, 5))
    hierarchy.keep(chain(0, 5), "chat", 1)
    assert hierarchy.flush(20)
    assert hierarchy.reports()[0].blocks == 5


def test_a_failing_tier_holds_up_no_other(make: partial[Hierarchy], pool: Pool, tmp_path: Path) -> None:
    """The disk is full: the shared tier below it is written all the same, and the failure is in the report."""
    files = FaultyFiles()
    disk, shared = make_disk(tmp_path / "disk", files=files), make_shared(tmp_path)
    hierarchy = make([disk, shared])
    files.write_error = 28
    pool.held.update(chain(0, 4))
    hierarchy.keep(chain(0, 4), "chat", 4)
    assert hierarchy.flush(20)
    assert (read(disk, chain(0, 4)), read(shared, chain(0, 4))) == (0, 4)
    assert "ENOSPC" in (hierarchy.reports()[0].failure or "")


def test_a_tier_that_cannot_be_looked_at_is_reported_as_failing(
    make: partial[Hierarchy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that is gone answers nothing, not even how full it is."""
    shared = make_shared(tmp_path)
    hierarchy = make([shared])

    def gone() -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(shared, "stats", gone)
    assert "Stale file handle" in (hierarchy.reports()[0].failure or "")
    assert hierarchy.capacities() == {Tier.SHARED: 40}


def test_the_speed_of_a_tier_follows_its_restores(make: partial[Hierarchy], tmp_path: Path) -> None:
    """From what the probe has found towards what restores take; tiny ones say nothing."""
    hierarchy = make([make_disk(tmp_path)])
    assert hierarchy.reports()[0].read_bytes_per_s is None
    hierarchy.was_read(Tier.DISK, 100, 1.0)
    assert hierarchy.reports()[0].read_bytes_per_s is None
    hierarchy.was_read(Tier.DISK, 1 << 30, 1.0)
    hierarchy.was_read(Tier.DISK, 1 << 20, 1.0)
    speed = hierarchy.reports()[0].read_bytes_per_s
    assert speed is not None
    assert 1 << 29 < speed < 1 << 30


def test_closing_gives_up_what_would_take_too_long(make: partial[Hierarchy], pool: Pool, tmp_path: Path) -> None:
    hierarchy = make([make_disk(tmp_path)])
    pool.gate.clear()
    pool.held.update(chain(0, 4))
    hierarchy.keep(chain(0, 4), "chat", 4)
    assert not hierarchy.flush(0.05)
    threading.Timer(0.2, pool.gate.set).start()
    hierarchy.close(timeout_s=0.05)
    hierarchy.keep(chain(1, 4), "chat", 4)
    assert hierarchy.reports()[0].dropped >= 4
