"""One conformance suite for all transports, and what each promises beyond it."""

from __future__ import annotations

import importlib.util
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
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
    TransferTimeout,
    TransportUnavailable,
)
from workers.kv_transfer.blocks import KVArray, KVBlocks
from workers.kv_transfer.leased import LeasedTransport
from workers.kv_transfer.loopback import Fabric, LoopbackTransport
from workers.kv_transfer.rdma import rdma_devices, why_no_rdma
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


@pytest.mark.parametrize("name", ["nixl_rdma", "mooncake_rdma"])
def test_rdma_that_is_absent_says_why(name: str) -> None:
    """Nothing passes TCP off as RDMA."""
    if why_no_rdma() is None:
        pytest.skip(f"this host has RDMA: {rdma_devices()}")
    with pytest.raises(TransportUnavailable, match="needs RDMA: no "):
        make_transport(name, KV)


def test_rdma_is_what_the_kernel_lists_as_active(tmp_path: Path) -> None:
    """A device without an active port carries nothing."""
    assert why_no_rdma(tmp_path / "none") == f"no device in {tmp_path / 'none'}"
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    assert rdma_devices(tmp_path) == ("mlx5_0",)
    assert why_no_rdma(tmp_path) is None
    (tmp_path / "mlx5_0" / "ports" / "1" / "state").write_text("1: DOWN\n")
    assert why_no_rdma(tmp_path) == "no active port on mlx5_0, mlx5_1"


def test_transports_are_chosen_by_name() -> None:
    """An unknown name is refused with what is allowed; a limit wraps, no limit does not."""
    with pytest.raises(
        ValueError, match="'pigeon'; allowed: loopback, mooncake, mooncake_rdma, nixl, nixl_rdma, object_store, rdt_nixl"
    ):
        make_transport("pigeon", KV)
    assert isinstance(make_transport("loopback", KV, LinkLimit(link_gbps=1)), ThrottledTransport)
    assert isinstance(make_transport("loopback", KV, LinkLimit()), LoopbackTransport)


@pytest.mark.parametrize("wrong", [{"link_gbps": 0}, {"link_gbps": -1}, {"latency_ms": -1}])
def test_impossible_links_are_refused(wrong: dict[str, float]) -> None:
    """A link needs a bandwidth above zero and a latency that is not negative."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LinkLimit(**wrong)


def offering(name: str) -> Any:
    """What runs in another process: a source of 4,000 blocks."""

    class Source:
        def offer(self) -> Any:
            self.transport = make_transport(name, KV)
            return self.transport.offer(kv(blocks=4000), LEASE_S)

    return Source


@pytest.mark.live
@pytest.mark.parametrize(
    "name",
    [
        "object_store",
        pytest.param("rdt_nixl", marks=installed("nixl")),
        pytest.param("nixl", marks=installed("nixl_cu12")),
        pytest.param("mooncake", marks=installed("mooncake")),
    ],
)
def test_an_offer_dies_with_its_source(local_ray: Any, name: str) -> None:
    """KV that a killed actor offered is reported gone, in time, and the target lives on."""
    target = make_transport(name, KV)
    source = local_ray.remote(enable_tensor_transport=name.startswith("rdt_"))(offering(name))
    actors = [source.options(num_cpus=0).remote() for _ in range(2)]
    alive, doomed = local_ray.get([actor.offer.remote() for actor in actors])
    assert same(take(target, doomed), kv_arrays(blocks=4000))
    local_ray.kill(actors[1])
    with pytest.raises((OfferGone, TransferTimeout)):
        fetch_until_refused(target, doomed)
    assert same(take(target, alive), kv_arrays(blocks=4000))
    local_ray.kill(actors[0])
    target.close()


def fetch_until_refused(target: KVTransport, ticket: KVTicket) -> None:
    """The bytes may still be there for a moment."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        take(target, ticket)
        time.sleep(0.2)


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
