"""One conformance suite for all transports, and what each promises beyond it."""

from __future__ import annotations

import importlib.util
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from workers.kv_transfer.base import (
    CorruptTransfer,
    KVDescriptor,
    KVTicket,
    KVTransport,
    LayoutMismatch,
    OfferGone,
    TransferError,
)
from workers.kv_transfer.blocks import KVArray, KVBlocks
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


Pair = tuple[KVTransport, KVTransport]
MakePair = Callable[[ManualClock], Pair]


def loopback_pair(clock: ManualClock) -> Pair:
    fabric: Fabric = {}
    return LoopbackTransport(KV, fabric, clock), LoopbackTransport(KV, fabric, clock)


def throttled_pair(clock: ManualClock) -> Pair:
    source, target = loopback_pair(clock)
    return source, ThrottledTransport(target, LinkLimit(link_gbps=10, latency_ms=1))


def object_store_pair(clock: ManualClock) -> Pair:
    from workers.kv_transfer.object_store import ObjectStoreTransport

    return ObjectStoreTransport(KV, clock=clock), ObjectStoreTransport(KV, clock=clock)


def cma_pair(clock: ManualClock) -> Pair:
    from workers.kv_transfer.cma import CmaTransport

    return CmaTransport(KV, clock), CmaTransport(KV, clock)


def nixl_pair(clock: ManualClock) -> Pair:
    from workers.kv_transfer.nixl import NixlTransport

    return NixlTransport(KV, clock), NixlTransport(KV, clock)


def rdt_nixl_pair(clock: ManualClock) -> Pair:
    from workers.kv_transfer.rdt import DirectTransport

    return DirectTransport(KV, clock), DirectTransport(KV, clock)


def mooncake_pair(clock: ManualClock) -> Pair:
    from workers.kv_transfer.mooncake import MooncakeTransport

    return MooncakeTransport(KV, clock=clock), MooncakeTransport(KV, clock=clock)


def installed(module: str) -> pytest.MarkDecorator:
    """The extra `rdma` is optional; CI installs it."""
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed: pip install kv-conductor[rdma]")


@pytest.fixture(scope="module")
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(loopback_pair, id="loopback"),
        pytest.param(throttled_pair, id="throttled"),
        pytest.param(object_store_pair, id="object_store", marks=pytest.mark.live),
        pytest.param(cma_pair, id="cma"),
        pytest.param(rdt_nixl_pair, id="rdt_nixl", marks=[pytest.mark.live, installed("nixl")]),
        pytest.param(nixl_pair, id="nixl", marks=installed("nixl_cu12")),
        pytest.param(mooncake_pair, id="mooncake", marks=installed("mooncake")),
    ],
)
def lasting_pair(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[Pair]:
    """Source and target, which some back ends take seconds to start."""
    make: MakePair = request.param
    if make in (object_store_pair, rdt_nixl_pair):
        request.getfixturevalue("local_ray")
    source, target = make(clock)
    yield source, target
    source.offer(kv(), LEASE_S)
    source.close()
    target.close()
    assert (source.offered, target.offered) == (0, 0)


@pytest.fixture
def pair(lasting_pair: Pair, clock: ManualClock) -> Iterator[Pair]:
    """Source and target with nothing on offer."""
    source, _ = lasting_pair
    yield lasting_pair
    clock.now += 2 * LEASE_S
    source.expire()
    assert source.offered == 0


def kv_arrays(blocks: int = 5, seed: int = 0, layers: int = KV.num_layers) -> list[KVArray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 256, (blocks, KV.layer_block_bytes), dtype=np.uint8) for _ in range(layers)]


def kv(blocks: int = 5, seed: int = 0) -> KVBlocks:
    return KVBlocks.of(kv_arrays(blocks, seed))


def take(target: KVTransport, ticket: KVTicket, first: int = 0) -> list[KVArray]:
    """All that a ticket offers, from the `first` block on, in fresh memory."""
    shape = (ticket.blocks - first, KV.layer_block_bytes)
    into = KVBlocks.of([np.zeros(shape, np.uint8) for _ in range(ticket.layers)], ticket.first_layer)
    target.fetch(ticket, into, TIMEOUT_S, first)
    return list(into.rows)


def same(these: Sequence[KVArray], those: Sequence[KVArray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(these, those, strict=True))


def test_bytes_arrive_as_offered(pair: Pair) -> None:
    """Every layer's blocks come out as they went in, and the ticket tells how many bytes that is."""
    source, target = pair
    sent = kv_arrays()
    ticket = source.offer(KVBlocks.of(sent), LEASE_S)
    assert same(take(target, ticket), sent)
    assert (ticket.blocks, ticket.nbytes) == (5, sum(array.nbytes for array in sent))


def test_scattered_blocks_find_their_places(pair: Pair) -> None:
    """Any blocks of a cache go to any blocks of another; all others are left alone."""
    source, target = pair
    theirs, ours = kv_arrays(blocks=9), [np.zeros((12, KV.layer_block_bytes), np.uint8) for _ in range(KV.num_layers)]
    from_ids, to_ids = (7, 2, 3, 0, 8), (10, 4, 5, 6, 1)
    ticket = source.offer(KVBlocks(tuple(theirs), from_ids), LEASE_S)
    target.fetch(ticket, KVBlocks(tuple(ours), to_ids), TIMEOUT_S)
    for their_layer, our_layer in zip(theirs, ours, strict=True):
        assert np.array_equal(our_layer[list(to_ids)], their_layer[list(from_ids)])
        assert not our_layer[[0, 2, 3, 7, 8, 9, 11]].any()


def test_a_group_of_layers_travels_alone(pair: Pair) -> None:
    """Some layers can be offered by themselves, and land in the same layers only."""
    source, target = pair
    sent = KVBlocks.of(kv_arrays())
    ticket = source.offer(sent.layers(1, 3), LEASE_S)
    assert (ticket.first_layer, ticket.layers, ticket.nbytes) == (1, 2, 5 * 2 * KV.layer_block_bytes)
    assert same(take(target, ticket), sent.rows[1:])
    with pytest.raises(LayoutMismatch, match="are asked of"):
        target.fetch(ticket, KVBlocks.of(kv_arrays(layers=2), first_layer=0), TIMEOUT_S)


def test_the_first_blocks_may_be_left_out(pair: Pair) -> None:
    """A target that holds the front of an offer fetches the rest."""
    source, target = pair
    sent = kv_arrays()
    ticket = source.offer(KVBlocks.of(sent), LEASE_S)
    assert same(take(target, ticket, first=2), [array[2:] for array in sent])
    with pytest.raises(LayoutMismatch, match="are asked of"):
        target.fetch(ticket, kv(blocks=4), TIMEOUT_S, first=2)


def test_the_source_may_overwrite_after_release(pair: Pair) -> None:
    """What was fetched stays as it was, whatever happens to the source's memory afterwards."""
    source, target = pair
    sent = kv_arrays()
    kept = [array.copy() for array in sent]
    ticket = source.offer(KVBlocks.of(sent), LEASE_S)
    got = take(target, ticket)
    source.release(ticket.id)
    for array in sent:
        array[:] = 0
    assert same(kept, got)


def test_offers_are_independent(pair: Pair) -> None:
    """Several offers live at once, are fetched in any order and from several threads, and end one by one."""
    source, target = pair
    offers = {seed: source.offer(kv(seed=seed), LEASE_S) for seed in range(4)}
    got: dict[int, list[KVArray]] = {}

    def fetch(seed: int) -> None:
        got[seed] = take(target, offers[seed])

    threads = [threading.Thread(target=fetch, args=(seed,)) for seed in reversed(offers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in offers:
        assert same(kv_arrays(seed=seed), got[seed])
    source.release(offers[0].id)
    assert source.offered == 3


def test_blocks_that_are_used_again_at_once_never_mix(pair: Pair) -> None:
    """Threads fill, offer, fetch and release scattered blocks as fast as they can, and each finds its own bytes."""
    source, target = pair
    ours, theirs = kv_arrays(blocks=32, seed=1), kv_arrays(blocks=32, seed=2)
    wrong: list[tuple[int, int]] = []

    def run(part: int) -> None:
        draw = np.random.default_rng(part)
        mine = range(8 * part, 8 * part + 8)
        for number in range(12):
            from_ids, to_ids = (tuple(int(i) for i in draw.permutation(mine)[:5]) for _ in range(2))
            for layer in theirs:
                layer[list(from_ids)] = draw.integers(0, 256, (5, KV.layer_block_bytes), dtype=np.uint8)
            ticket = source.offer(KVBlocks(tuple(theirs), from_ids), LEASE_S)
            target.fetch(ticket, KVBlocks(tuple(ours), to_ids), TIMEOUT_S)
            if not same([layer[list(to_ids)] for layer in ours], [layer[list(from_ids)] for layer in theirs]):
                wrong.append((part, number))
            source.release(ticket.id)

    threads = [threading.Thread(target=run, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, source.offered) == ([], 0)


def test_release_is_idempotent(pair: Pair) -> None:
    """Releasing twice, or something unknown, changes nothing."""
    source, _ = pair
    ticket = source.offer(kv(), LEASE_S)
    for ticket_id in (ticket.id, ticket.id, "unknown"):
        source.release(ticket_id)
    assert source.offered == 0


def test_an_expired_offer_is_gone(pair: Pair, clock: ManualClock) -> None:
    """After its lease an offer is refused by the target and let go by the source."""
    source, target = pair
    ticket = source.offer(kv(), LEASE_S)
    assert source.expire() == ()
    clock.now += LEASE_S
    with pytest.raises(OfferGone, match="lease"):
        take(target, ticket)
    assert source.expire() == (ticket.id,)
    assert source.offered == 0


def test_another_layout_is_refused(pair: Pair) -> None:
    """KV of another version, type or shape is refused before a byte is read."""
    source, target = pair
    ticket = source.offer(kv(), LEASE_S)
    for foreign in (replace(KV, version=2), replace(KV, dtype="bfloat16"), replace(KV, token_shape=(2, 2, 1))):
        with pytest.raises(LayoutMismatch, match="this cache holds"):
            take(target, replace(ticket, kv=foreign))


def test_wrong_arrays_are_refused_and_leave_nothing(pair: Pair) -> None:
    """An offer of too many layers, of blocks of another size or that do not exist fails as a whole."""
    source, _ = pair
    rows = tuple(kv_arrays())
    narrow = tuple(array[:, :32] for array in rows)
    for wrong in (KVBlocks((*rows, rows[0]), (0,)), KVBlocks(narrow, (0,)), KVBlocks(rows, (0, 5)), KVBlocks((), (0,))):
        with pytest.raises(LayoutMismatch, match="are expected"):
            source.offer(wrong, LEASE_S)
    assert source.offered == 0


def test_a_ticket_that_claims_more_than_there_is_is_caught(pair: Pair) -> None:
    """A partial block list never passes for the whole."""
    source, target = pair
    ticket = source.offer(kv(), LEASE_S)
    with pytest.raises(CorruptTransfer, match="are expected"):
        take(target, replace(ticket, blocks=6))


def test_damaged_bytes_are_caught(pair: Pair) -> None:
    """A checksum that does not match is corruption, on whatever transport it was made."""
    source, target = pair
    ticket = source.offer(kv(), LEASE_S)
    good = kv().checksums()
    take(target, replace(ticket, checksums=good), first=1)
    with pytest.raises(CorruptTransfer, match="checksum"):
        take(target, replace(ticket, checksums=(*good[:4], good[4] ^ 1)), first=1)


def test_a_ticket_of_another_transport_is_refused(pair: Pair) -> None:
    """Tickets name their transport."""
    source, target = pair
    ticket = source.offer(kv(), LEASE_S)
    with pytest.raises(TransferError, match="carrier_pigeon"):
        take(target, replace(ticket, transport="carrier_pigeon"))


def test_tickets_pickle(clock: ManualClock) -> None:
    """A loopback ticket survives pickling (those of the object store travel through Ray itself)."""
    source, target = loopback_pair(clock)
    ticket = pickle.loads(pickle.dumps(source.offer(kv(), LEASE_S)))
    assert same(take(target, ticket), kv_arrays())


@pytest.mark.parametrize(
    "make",
    [
        loopback_pair,
        pytest.param(nixl_pair, marks=installed("nixl_cu12")),
        pytest.param(mooncake_pair, marks=installed("mooncake")),
    ],
)
def test_a_released_offer_is_gone(make: MakePair, clock: ManualClock) -> None:
    """Where no copy outlives the release, nothing can be fetched after it, and a fetch that it overtook fails."""
    source, target = make(clock)
    ticket = source.offer(kv(), LEASE_S)
    source.release(ticket.id)
    source.offer(kv(seed=1), LEASE_S)  # takes the place of the first wherever it can
    with pytest.raises(OfferGone, match="released"):
        take(target, ticket)
    source.close()
    target.close()


def test_a_lease_that_ends_during_a_fetch_fails_it(clock: ManualClock) -> None:
    """The source may have used the blocks again before the last of them was read."""

    class Slow(LoopbackTransport):
        def _receive(self, *args: Any) -> None:
            super()._receive(*args)
            clock.now += LEASE_S

    fabric: Fabric = {}
    ticket = LoopbackTransport(KV, fabric, clock).offer(kv(), LEASE_S)
    with pytest.raises(OfferGone, match="lease"):
        take(Slow(KV, fabric, clock), ticket)


def test_a_failed_publication_leaves_no_offer(clock: ManualClock) -> None:
    """When bytes cannot be published, there is no lease to end."""

    class Full(LoopbackTransport):
        def _publish(self, offer_id: str, blocks: Any) -> None:
            raise TransferError("no room")

    source: LeasedTransport = Full(KV, {}, clock)
    with pytest.raises(TransferError, match="no room"):
        source.offer(kv(), LEASE_S)
    assert source.offered == 0


def test_transports_are_chosen_by_name() -> None:
    """An unknown name is refused with what is allowed; a limit wraps, no limit does not."""
    with pytest.raises(
        ValueError, match="'pigeon'; allowed: cma, loopback, mooncake, mooncake_rdma, nixl, nixl_rdma, object_store, rdt_nixl"
    ):
        make_transport("pigeon", KV)
    assert isinstance(make_transport("loopback", KV, LinkLimit(link_gbps=1)), ThrottledTransport)
    assert isinstance(make_transport("loopback", KV, LinkLimit()), LoopbackTransport)
