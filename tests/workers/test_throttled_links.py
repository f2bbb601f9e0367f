"""A throttled link: as slow as it says, shared by what is under way at once, and labelled."""

from __future__ import annotations

import threading
import time

import pytest

from tests.workers.test_kv_transfer import LEASE_S, ManualClock, kv, loopback_pair, take
from workers.kv_transfer.base import TransferTimeout
from workers.kv_transfer.throttled import LinkLimit, ThrottledTransport


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_a_throttle_holds_back_and_says_so(clock: ManualClock) -> None:
    """A throttled transfer takes at least bytes over bandwidth plus latency, one after the other, and is labelled."""
    source, inner = loopback_pair(clock)
    ticket = source.offer(kv(blocks=100), LEASE_S)
    limit = LinkLimit(link_gbps=ticket.nbytes * 8 / 0.02 / 1e9, latency_ms=5)
    target = ThrottledTransport(inner, limit)
    began_s = time.monotonic()
    take(target, ticket)
    take(target, ticket)
    assert time.monotonic() - began_s >= 0.045
    assert "throttled" in target.protocol
    with pytest.raises(TransferTimeout, match="more than"):
        target.fetch(ticket, kv(blocks=100), 0.01)


@pytest.mark.parametrize("wrong", [{"link_gbps": 0}, {"link_gbps": -1}, {"latency_ms": -1}])
def test_impossible_links_are_refused(wrong: dict[str, float]) -> None:
    """A link needs a bandwidth above zero and a latency that is not negative."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LinkLimit(**wrong)


def test_transfers_that_overlap_share_a_throttled_link(clock: ManualClock) -> None:
    """Two at once take twice as long as one, both of them; what starts when the other has ended has the link for itself."""
    source, inner = loopback_pair(clock)
    ticket = source.offer(kv(blocks=100), LEASE_S)
    alone_s = 0.3
    target = ThrottledTransport(inner, LinkLimit(link_gbps=ticket.nbytes * 8 / alone_s / 1e9))
    seconds: list[float] = []
    ready = threading.Barrier(2)

    def fetch() -> None:
        ready.wait()
        began_s = time.monotonic()
        take(target, ticket)
        seconds.append(time.monotonic() - began_s)

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(seconds) >= 1.3 * alone_s
    assert max(seconds) >= 1.5 * alone_s
    beside = threading.Thread(target=take, args=(target, ticket))
    beside.start()
    assert target._link is not None
    while not target._link._under_way:
        time.sleep(0.001)
    with pytest.raises(TransferTimeout, match="others use too"):
        target.fetch(ticket, kv(blocks=100), 1.2 * alone_s)
    beside.join()
