"""One conformance suite for all transports, and what each promises beyond it."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from workers.kv_transfer.base import (
    CorruptTransfer,
    KVArray,
    KVDescriptor,
    KVTransport,
    LayoutMismatch,
    OfferGone,
    TransferError,
    TransferTimeout,
)
from workers.kv_transfer.leased import LeasedTransport
from workers.kv_transfer.loopback import Fabric, LoopbackTransport
from workers.kv_transfer.select import make_transport
from workers.kv_transfer.throttled import LinkLimit, ThrottledTransport

KV = KVDescriptor("gqa", 1, "float32", (2, 1, 2), num_layers=3, block_tokens=4, layer_block_bytes=64)
LEASE_S, TIMEOUT_S = 30.0, 10.0


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


MakePair = Callable[[ManualClock], tuple[KVTransport, KVTransport]]


def loopback_pair(clock: ManualClock) -> tuple[KVTransport, KVTransport]:
    fabric: Fabric = {}
    return LoopbackTransport(KV, fabric, clock), LoopbackTransport(KV, fabric, clock)


def throttled_pair(clock: ManualClock) -> tuple[KVTransport, KVTransport]:
    source, target = loopback_pair(clock)
    return source, ThrottledTransport(target, LinkLimit(link_gbps=10, latency_ms=1))


def object_store_pair(clock: ManualClock) -> tuple[KVTransport, KVTransport]:
    from workers.kv_transfer.object_store import ObjectStoreTransport

    return ObjectStoreTransport(KV, clock=clock), ObjectStoreTransport(KV, clock=clock)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(
    params=[
        pytest.param(loopback_pair, id="loopback"),
        pytest.param(throttled_pair, id="throttled"),
        pytest.param(object_store_pair, id="object_store", marks=pytest.mark.live),
    ]
)
def pair(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[tuple[KVTransport, KVTransport]]:
    """Source and target; nothing is on offer any more when they close."""
    make: MakePair = request.param
    if make is object_store_pair:
        request.getfixturevalue("local_ray")
    source, target = make(clock)
    yield source, target
    source.close()
    target.close()
    assert (source.offered, target.offered) == (0, 0)


def kv_arrays(blocks: int = 5, seed: int = 0) -> list[KVArray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 256, (blocks, KV.layer_block_bytes), dtype=np.uint8) for _ in range(KV.num_layers)]


def test_bytes_arrive_as_offered(pair: tuple[KVTransport, KVTransport]) -> None:
    """Every layer's blocks come out as they went in, and the ticket tells how many bytes that is."""
    source, target = pair
    sent = kv_arrays()
    ticket = source.offer(sent, LEASE_S)
    got = target.fetch(ticket, TIMEOUT_S)
    assert all(np.array_equal(a, b) for a, b in zip(sent, got, strict=True))
    assert (ticket.blocks, ticket.nbytes) == (5, sum(array.nbytes for array in sent))


def test_the_source_may_overwrite_after_release(pair: tuple[KVTransport, KVTransport]) -> None:
    """What was fetched stays as it was, whatever happens to the source's memory afterwards."""
    source, target = pair
    sent = kv_arrays()
    kept = [array.copy() for array in sent]
    ticket = source.offer(sent, LEASE_S)
    got = target.fetch(ticket, TIMEOUT_S)
    source.release(ticket.id)
    for array in sent:
        array[:] = 0
    assert all(np.array_equal(a, b) for a, b in zip(kept, got, strict=True))


def test_offers_are_independent(pair: tuple[KVTransport, KVTransport]) -> None:
    """Several offers live at once, are fetched in any order and from several threads, and end one by one."""
    source, target = pair
    offers = {seed: source.offer(kv_arrays(seed=seed), LEASE_S) for seed in range(4)}
    got: dict[int, list[KVArray]] = {}

    def fetch(seed: int) -> None:
        got[seed] = target.fetch(offers[seed], TIMEOUT_S)

    threads = [threading.Thread(target=fetch, args=(seed,)) for seed in reversed(offers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in offers:
        assert all(np.array_equal(a, b) for a, b in zip(kv_arrays(seed=seed), got[seed], strict=True))
    source.release(offers[0].id)
    assert source.offered == 3


def test_release_is_idempotent(pair: tuple[KVTransport, KVTransport]) -> None:
    """Releasing twice, or something unknown, changes nothing."""
    source, _ = pair
    ticket = source.offer(kv_arrays(), LEASE_S)
    for ticket_id in (ticket.id, ticket.id, "unknown"):
        source.release(ticket_id)
    assert source.offered == 0


def test_an_expired_offer_is_gone(pair: tuple[KVTransport, KVTransport], clock: ManualClock) -> None:
    """After its lease an offer is refused by the target and let go by the source."""
    source, target = pair
    ticket = source.offer(kv_arrays(), LEASE_S)
    assert source.expire() == ()
    clock.now += LEASE_S
    with pytest.raises(OfferGone, match="lease"):
        target.fetch(ticket, TIMEOUT_S)
    assert source.expire() == (ticket.id,)
    assert source.offered == 0


def test_another_layout_is_refused(pair: tuple[KVTransport, KVTransport]) -> None:
    """KV of another version, type or shape is refused before a byte is read."""
    source, target = pair
    ticket = source.offer(kv_arrays(), LEASE_S)
    for foreign in (replace(KV, version=2), replace(KV, dtype="bfloat16"), replace(KV, token_shape=(2, 2, 1))):
        with pytest.raises(LayoutMismatch, match="this cache holds"):
            target.fetch(replace(ticket, kv=foreign), TIMEOUT_S)


def test_wrong_arrays_are_refused_and_leave_nothing(pair: tuple[KVTransport, KVTransport]) -> None:
    """An offer with a missing layer or a ragged one fails as a whole."""
    source, _ = pair
    ragged = [*kv_arrays()[:2], kv_arrays(blocks=4)[0]]
    for arrays in (kv_arrays()[:2], ragged, []):
        with pytest.raises(LayoutMismatch, match="are expected"):
            source.offer(arrays, LEASE_S)
    assert source.offered == 0


def test_a_ticket_that_claims_more_than_there_is_is_caught(pair: tuple[KVTransport, KVTransport]) -> None:
    """A partial block list never passes for the whole."""
    source, target = pair
    ticket = source.offer(kv_arrays(), LEASE_S)
    with pytest.raises(CorruptTransfer, match="are expected"):
        target.fetch(replace(ticket, blocks=6), TIMEOUT_S)


def test_damaged_bytes_are_caught(pair: tuple[KVTransport, KVTransport]) -> None:
    """A checksum that does not match is corruption, on whatever transport it was made."""
    source, target = pair
    ticket = source.offer(kv_arrays(), LEASE_S)
    with pytest.raises(CorruptTransfer, match="checksum"):
        target.fetch(replace(ticket, checksum=1), TIMEOUT_S)


def test_a_ticket_of_another_transport_is_refused(pair: tuple[KVTransport, KVTransport]) -> None:
    """Tickets name their transport."""
    source, target = pair
    ticket = source.offer(kv_arrays(), LEASE_S)
    with pytest.raises(TransferError, match="carrier_pigeon"):
        target.fetch(replace(ticket, transport="carrier_pigeon"), TIMEOUT_S)


def test_tickets_pickle(clock: ManualClock) -> None:
    """A loopback ticket survives pickling (those of the object store travel through Ray itself)."""
    source, target = loopback_pair(clock)
    ticket = pickle.loads(pickle.dumps(source.offer(kv_arrays(), LEASE_S)))
    assert np.array_equal(target.fetch(ticket, TIMEOUT_S)[1], kv_arrays()[1])


def test_a_released_loopback_offer_is_gone(clock: ManualClock) -> None:
    """Loopback lets go of the bytes at release."""
    source, target = loopback_pair(clock)
    ticket = source.offer(kv_arrays(), LEASE_S)
    source.release(ticket.id)
    with pytest.raises(OfferGone, match="released"):
        target.fetch(ticket, TIMEOUT_S)


def test_a_failed_publication_leaves_no_offer(clock: ManualClock) -> None:
    """When bytes cannot be published, there is no lease to end."""

    class Full(LoopbackTransport):
        def _publish(self, offer_id: str, arrays: Any) -> None:
            raise TransferError("no room")

    source: LeasedTransport = Full(KV, {}, clock)
    with pytest.raises(TransferError, match="no room"):
        source.offer(kv_arrays(), LEASE_S)
    assert source.offered == 0


def test_a_throttle_holds_back_and_says_so(clock: ManualClock) -> None:
    """A throttled transfer takes at least bytes over bandwidth plus latency, one after the other, and is labelled."""
    source, inner = loopback_pair(clock)
    ticket = source.offer(kv_arrays(blocks=100), LEASE_S)
    limit = LinkLimit(link_gbps=ticket.nbytes * 8 / 0.02 / 1e9, latency_ms=5)
    target = ThrottledTransport(inner, limit)
    began_s = time.monotonic()
    target.fetch(ticket, TIMEOUT_S)
    target.fetch(ticket, TIMEOUT_S)
    assert time.monotonic() - began_s >= 0.045
    assert "throttled" in target.protocol
    with pytest.raises(TransferTimeout, match="more than"):
        target.fetch(ticket, 0.01)


def test_transports_are_chosen_by_name() -> None:
    """An unknown name is refused with what is allowed; a limit wraps, no limit does not."""
    with pytest.raises(ValueError, match="'pigeon'; allowed: loopback, object_store"):
        make_transport("pigeon", KV)
    assert isinstance(make_transport("loopback", KV, LinkLimit(link_gbps=1)), ThrottledTransport)
    assert isinstance(make_transport("loopback", KV, LinkLimit()), LoopbackTransport)


@pytest.mark.parametrize("wrong", [{"link_gbps": 0}, {"link_gbps": -1}, {"latency_ms": -1}])
def test_impossible_links_are_refused(wrong: dict[str, float]) -> None:
    """A link needs a bandwidth above zero and a latency that is not negative."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LinkLimit(**wrong)


@pytest.mark.live
def test_an_offer_dies_with_its_source(local_ray: Any, clock: ManualClock) -> None:
    """KV that a killed actor offered is reported gone, in time, and the target lives on."""
    from workers.kv_transfer.object_store import ObjectStoreTransport

    class Source:
        def offer(self) -> Any:
            self.transport = ObjectStoreTransport(KV)
            return self.transport.offer(kv_arrays(blocks=4000), LEASE_S)

    actor = local_ray.remote(Source).options(num_cpus=0).remote()
    ticket = local_ray.get(actor.offer.remote())
    target = ObjectStoreTransport(KV)
    assert np.array_equal(target.fetch(ticket, TIMEOUT_S)[0], kv_arrays(blocks=4000)[0])
    doomed = local_ray.get(actor.offer.remote())
    local_ray.kill(actor)
    with pytest.raises((OfferGone, TransferTimeout)):
        fetch_until_refused(target, doomed)


def fetch_until_refused(target: KVTransport, ticket: Any) -> None:
    """The store may still hold the bytes for a moment."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        target.fetch(ticket, TIMEOUT_S)
        time.sleep(0.2)
