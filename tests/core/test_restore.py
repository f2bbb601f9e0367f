"""The cheapest way to a prefix: compute it, pull it from a peer, or restore it from a lower tier."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from conductor.core.config import SchedulerConfig
from conductor.core.events import LoadReported, RequestCancelled, WorkerLost
from conductor.core.types import Holder, ReusePlan, Tier, TierReport, WorkerLoad
from tests.core.builders import PROFILE, Drive, blocks, cluster, drive, request

TIERS = {tier: 10_000 for tier in Tier}
CONFIG = SchedulerConfig(policy="conductor")


def tiered(host: float = 1e10, disk: float = 1e9, shared: float = 1e8, prefill: int = 1, **config: object) -> Drive:
    """Workers whose tiers read at so many bytes per second; 640 tokens are 64 MB, and computing them takes 64 ms."""
    profile = replace(PROFILE, tier_bytes_per_s=(1e12, host, disk, shared))
    changed = replace(CONFIG, **config)  # type: ignore[arg-type]
    return drive(changed, cluster(prefill=prefill, capacity_blocks=TIERS, profile=profile))


@pytest.mark.parametrize(("tier", "owner"), [(Tier.HOST, "node-p0"), (Tier.DISK, "node-p0"), (Tier.SHARED, "shared")])
def test_a_prefix_is_restored_from_a_fast_lower_tier(tier: Tier, owner: str) -> None:
    """What lies below is brought up where that beats computing it."""
    driven = tiered(disk=1e10, shared=1e10)
    driven.store("p0", blocks(10, shared=10), tier)
    assert driven.place(request(shared=10)).reuse == ReusePlan(0, 9 * 64, Holder(owner, tier))


def test_a_slow_tier_is_not_worth_its_time() -> None:
    """At 100 MB/s the prompt is computed in less time than it is read."""
    driven = tiered()
    driven.store("p0", blocks(10, shared=10), Tier.SHARED)
    assert driven.place(request(shared=10)).reuse == ReusePlan(0, 0, None)


def test_the_fastest_of_several_tiers_is_read() -> None:
    """Host and disk hold the same; the host is read."""
    driven = tiered()
    driven.store("p0", blocks(10, shared=10), Tier.DISK)
    driven.store("p0", blocks(10, shared=10), Tier.HOST)
    assert driven.place(request(shared=10)).reuse.source == Holder("node-p0", Tier.HOST)


def test_only_what_the_device_pool_lacks_is_restored() -> None:
    driven = tiered()
    driven.store("p0", blocks(4, shared=10))
    driven.store("p0", blocks(10, shared=10), Tier.HOST)
    assert driven.place(request(shared=10)).reuse == ReusePlan(4 * 64, 5 * 64, Holder("node-p0", Tier.HOST))


def test_a_restore_is_chosen_over_a_slower_pull() -> None:
    """A peer holds the prefix, but its link is slower than the own node's memory."""
    driven = tiered(prefill=2, host=1e11)
    driven.store("p1", blocks(10, shared=10))
    driven.store("p0", blocks(10, shared=10), Tier.HOST)
    driven.place(request(shared=10))
    record = driven.scheduler.decision_record("r1")
    assert record is not None
    rows = {row["worker"]: row for row in record["candidates"]}
    assert (rows["p0"]["source"], rows["p1"]["source"]) == ("node-p0/host", None)


def test_the_estimate_counts_the_time_to_restore() -> None:
    """57.6 MB at 10 GB/s, and 64 tokens to compute."""
    driven = tiered()
    driven.store("p0", blocks(10, shared=10), Tier.HOST)
    estimate = driven.place(request(shared=10)).ttft
    assert (estimate.transfer_s, estimate.prefill_s) == pytest.approx((576 * 1e5 / 1e10, 0.01 + 64e-4))


def test_a_node_that_is_gone_is_not_read() -> None:
    """With the last worker of a node its memory is out of reach; the shared store stays."""
    driven = tiered(prefill=2, shared=1e10)
    driven.store("p0", blocks(10, shared=10), Tier.HOST)
    driven.store("p0", blocks(10, shared=10), Tier.SHARED)
    driven(WorkerLost("p0", 1))
    source = driven.place(request(shared=10)).reuse.source
    assert source != Holder("node-p0", Tier.HOST)


def test_a_tier_is_as_fast_as_its_restores_have_been() -> None:
    """A disk that was fast when it was opened turns out slow: the prompt is computed; it recovers: it is read again."""
    driven = tiered(disk=1e10)
    driven.store("p0", blocks(10, shared=10), Tier.DISK)
    for number, (speed, source) in enumerate([(1e8, None), (1e10, Holder("node-p0", Tier.DISK))]):
        report = TierReport(tier=Tier.DISK, read_bytes_per_s=speed)
        driven(LoadReported("p0", 1, WorkerLoad(), (report,)))
        placed = driven.place(request(f"r{number}", shared=10))
        assert placed.reuse.source == source
        driven(RequestCancelled(placed.request_id))
        driven.scheduler._index.expire(math.inf)


def test_speeds_that_say_nothing_about_a_restore_change_nothing() -> None:
    """A tier that was never read, a device pool's, and a decode worker's, which restores nothing."""
    driven = tiered(disk=1e10)
    driven.store("p0", blocks(10, shared=10), Tier.DISK)
    slow = TierReport(tier=Tier.DISK, read_bytes_per_s=1e8)
    driven(LoadReported("p0", 1, WorkerLoad(), (TierReport(tier=Tier.DISK), replace(slow, tier=Tier.DEVICE))))
    driven(LoadReported("d0", 1, WorkerLoad(), (slow,)))
    assert driven.place(request(shared=10)).reuse.source == Holder("node-p0", Tier.DISK)


def test_what_others_report_on_as_well_outlives_a_worker() -> None:
    """The shared store is not gone with one of those that told of it, and is with the last."""
    driven = tiered(prefill=3, shared=1e10)
    driven.store("p0", blocks(10, shared=10), Tier.SHARED)
    driven.store("p1", blocks(3, shared=3), Tier.SHARED)
    driven(WorkerLost("p0", 1))
    assert driven.place(request(shared=10)).reuse == ReusePlan(0, 9 * 64, Holder("shared", Tier.SHARED))
    driven(WorkerLost("p1", 1))
    assert driven.place(request("r2", shared=10)).reuse.source != Holder("shared", Tier.SHARED)


def test_without_lower_tiers_none_is_looked_at() -> None:
    """A cluster of device pools alone keeps no list of tiers."""
    driven = drive(CONFIG)
    assert driven.scheduler._view.prefill.lower_holders == ()
