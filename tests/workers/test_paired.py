"""The choice of a transport for each pair of workers: measured, remembered, left when it fails; and what links are worth."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import numpy as np
import pytest

from tests.workers.actor_doubles import Cluster, loopback_parts, make_job, place, until
from tests.workers.doubles import expected_output
from workers.kv_transfer.base import KVDescriptor, KVTicket, OfferGone, TransportUnavailable
from workers.kv_transfer.blocks import KVBlocks
from workers.kv_transfer.link_meter import LinkMeter, LinkSpeed
from workers.kv_transfer.loopback import Fabric, LoopbackTransport
from workers.kv_transfer.paired import SHUNNED_S, PairedTransports
from workers.kv_transfer.select import make_transports, transport_names

KV = KVDescriptor("gqa", 1, "float32", (2, 1, 2), num_layers=3, block_tokens=4, layer_block_bytes=64)
LEASE_S = 30.0
PROMPT = tuple(range(3, 40))


class Named(LoopbackTransport):
    """A loopback under another name, as slow as it is told to be, or broken."""

    def __init__(self, kv: KVDescriptor, fabric: Fabric, name: str, delay_s: float = 0.0) -> None:
        super().__init__(kv, fabric)
        self.name = name
        self.delay_s = delay_s
        self.broken = False
        self.fetched = 0

    def fetch(self, ticket: KVTicket, into: KVBlocks, timeout_s: float, first: int = 0) -> None:
        if self.broken:
            raise OfferGone("the link is down")
        time.sleep(self.delay_s)
        super().fetch(ticket, into, timeout_s, first)
        self.fetched += 1


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def transports(fabric: Fabric, clock: Clock | None = None, **delays_s: float) -> PairedTransports:
    made = {name: Named(KV, fabric, name, delay_s) for name, delay_s in delays_s.items()}
    return PairedTransports(KV, made, clock or Clock())


def kv() -> KVBlocks:
    return KVBlocks.of([np.full((2, KV.layer_block_bytes), layer, np.uint8) for layer in range(KV.num_layers)])


def meet(source: PairedTransports, target: PairedTransports) -> tuple[str, ...]:
    tickets = source.offer_probes()
    ranked = target.rank_probes("source", tickets)
    source.use("target", ranked)
    for ticket in tickets:
        source.release(ticket.id)
    assert source.offered == 0
    return ranked


def test_the_fastest_that_both_have_is_used() -> None:
    """What only one side has does not count, and a peer that was not measured gets the first of the configuration."""
    fabric: Fabric = {}
    source, target = transports(fabric, slow=0.02, fast=0.0, mine=0.0), transports(fabric, fast=0.0, slow=0.02)
    assert not source.measured("target")
    ticket = source.offer(kv(), LEASE_S, "target")
    assert ticket.transport == "slow"
    source.release(ticket.id)
    assert meet(source, target) == ("fast", "slow")
    assert source.chosen() == {"target": "fast"}
    source.release(source.offer(kv(), LEASE_S, "stranger").id)


def test_a_transport_that_fails_is_left_for_a_while() -> None:
    """The next in order takes its place, for this peer only; that is counted, and ends by itself."""
    clock = Clock()
    source = transports({}, clock, first=0.0, second=0.0)
    assert source.shun("target", "first", "down")
    assert source.offer(kv(), LEASE_S, "target").transport == "second"
    assert source.offer(kv(), LEASE_S, "other").transport == "first"
    assert source.shun("target", "first", "still down")
    assert source.fallbacks == 1
    clock.now += SHUNNED_S
    assert source.offer(kv(), LEASE_S, "target").transport == "first"


def test_the_last_transport_has_no_successor() -> None:
    """A single transport goes on being used whatever happened, and nobody claims that another one is."""
    source = transports({}, only=0.0)
    assert not source.shun("target", "only", "down")
    assert source.offer(kv(), LEASE_S, "target").transport == "only"
    assert source.fallbacks == 0


def test_a_ticket_of_a_transport_that_is_not_here_is_refused() -> None:
    """It could only be guessed how to fetch it."""
    fabric: Fabric = {}
    ticket = transports(fabric, theirs=0.0).offer(kv(), LEASE_S)
    with pytest.raises(TransportUnavailable, match="'theirs' is not here; there are ours"):
        transports(fabric, ours=0.0).fetch(ticket, kv(), LEASE_S)


def test_what_a_configuration_names() -> None:
    """One, several, or all that are here; with `auto` nothing that is missing stops a worker, asked for by name it does."""
    assert transport_names("nixl, object_store") == ("nixl", "object_store")
    assert "object_store" in transport_names("auto")
    with pytest.raises(ValueError, match="each once"):
        transport_names("nixl,nixl")
    assert list(make_transports("loopback", KV)) == ["loopback"]
    with pytest.raises(TransportUnavailable):
        PairedTransports(KV, {})


# --- workers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def pair_of_workers() -> Any:
    """A prefill and a decode worker that share a quick and a slow transport, the slow one first in order."""
    cluster = Cluster()
    made: dict[str, dict[str, Named]] = {}

    def build(config: Any) -> Any:
        parts = loopback_parts(cluster.fabric)(config)
        cache_kv = parts.engine.cache.kv
        made[config.worker_id] = {
            name: Named(cache_kv, cluster.fabric, name, delay_s) for name, delay_s in (("slow", 0.01), ("quick", 0.0))
        }
        return type(parts)(parts.engine, made[config.worker_id], parts.profile, parts.model_name, parts.root_of)

    for worker_id in ("p0", "p1", "d0"):
        await cluster.add(worker_id, build=build)
    yield cluster, made
    await cluster.close()


async def serve(cluster: Cluster, number: int, **how: Any) -> None:
    prompt = (number, *PROMPT)
    job = make_job(f"r{number}", prompt)
    await cluster.submit(job, place(job, "p0", "d0", **how))
    assert await cluster.output_of(f"r{number}") == expected_output(prompt, 8)


async def test_a_pair_is_measured_beside_its_first_hand_over(pair_of_workers: Any) -> None:
    """The first hand-over goes by the configured order; later ones by what was measured."""
    cluster, made = pair_of_workers
    await serve(cluster, 1)
    prefill = cluster.workers["p0"]
    await until(lambda: prefill.transport.measured("d0"))
    assert prefill.transport.chosen() == {"d0": "quick"}
    before = made["d0"]["slow"].fetched
    await serve(cluster, 2)
    assert made["d0"]["slow"].fetched == before
    assert (await prefill.stats())["transport_of_peer"] == {"d0": "quick"}


async def test_a_hand_over_falls_back_when_its_transport_fails(pair_of_workers: Any) -> None:
    """The request is served over the other one, at once, and the fall-back is counted."""
    cluster, made = pair_of_workers
    await serve(cluster, 1)
    prefill = cluster.workers["p0"]
    await until(lambda: prefill.transport.measured("d0"))
    made["d0"]["quick"].broken = True
    await serve(cluster, 2)
    assert prefill.transport.fallbacks == 1
    assert prefill._load().transport_fallbacks == 1
    assert prefill.transport.chosen() == {"d0": "slow"}


async def test_a_pull_falls_back_too(pair_of_workers: Any) -> None:
    """What one transport does not bring comes over another; the prefix is not computed again."""
    cluster, made = pair_of_workers
    await serve(cluster, 1)
    made["p1"]["slow"].broken = True
    blocks = make_job("x", (1, *PROMPT)).request.block_hashes
    await cluster.workers["p1"].pull_blocks("t1", cluster.handles["p0"], blocks)
    assert cluster.workers["p1"].cache.match(blocks) == len(blocks)
    assert cluster.workers["p0"].transport.fallbacks == 1
    made["p1"]["slow"].broken = False
    await until(lambda: cluster.workers["p0"].transport.measured("p1"))


# --- links ------------------------------------------------------------------------------------------------------------


class Link:
    """A link of given speed, on a clock of its own, with a little noise."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.true = LinkSpeed(latency_s, bytes_per_s)
        self.clock = Clock()
        self.meter = LinkMeter(self.clock)
        self.draw = random.Random(0)

    def move(self, nbytes: int, share: int = 1) -> None:
        with self.meter.transfer() as moved:
            moved.was("peer", "t", nbytes)
            self.clock.now += share * self.true.transfer_s(nbytes) * self.draw.uniform(0.9, 1.1)

    def fail(self, nbytes: int) -> None:
        with self.meter.transfer() as moved:
            moved.was("peer", "t", nbytes)
            raise OfferGone("gone")

    def error(self, nbytes: int) -> float:
        speed = self.meter.speed("peer", "t")
        assert speed is not None
        return abs(speed.transfer_s(nbytes) / self.true.transfer_s(nbytes) - 1)


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(0.001, 3e9), (0.0002, 8e8), (0.05, 1.25e8), (0.0, 1e7)])
def test_a_link_is_known_after_a_few_transfers(latency_s: float, bytes_per_s: float) -> None:
    """From transfers of all sizes follows the time of any size."""
    link = Link(latency_s, bytes_per_s)
    sizes = [int(1e6 * 200 ** (i / 9)) for i in range(10)]
    for nbytes in sizes * 2:
        link.move(nbytes)
    assert statistics.median(link.error(nbytes) for nbytes in sizes) < 0.1


def test_a_link_that_changes_is_followed() -> None:
    """Ten times slower is known within some twenty transfers."""
    link = Link(0.001, 1e9)
    for _ in range(30):
        link.move(int(link.draw.uniform(1e6, 1e8)))
    link.true = LinkSpeed(0.001, 1e8)
    for _ in range(40):
        link.move(int(link.draw.uniform(1e6, 1e8)))
    assert link.error(50_000_000) < 0.2


@pytest.mark.parametrize("sharing", [0.0, 0.5, 1.0])
def test_how_far_overlapping_transfers_slow_each_other_down_is_learned(sharing: float) -> None:
    """The idle link keeps its speed, and two at once are foreseen to take what they take."""
    link = Link(0.0, 1e9)
    link.meter = LinkMeter(link.clock)
    for number in range(40):
        nbytes = int(link.draw.uniform(1e6, 1e8))
        together = 1 + number % 2
        seconds = link.true.transfer_s(nbytes) * (1.0 + sharing * (together - 1)) * link.draw.uniform(0.95, 1.05)
        link.meter.add("peer", "t", nbytes, seconds, float(together))
    speed = link.meter.speed("peer", "t")
    assert speed is not None
    assert speed.bytes_per_s == pytest.approx(1e9, rel=0.1)
    assert speed.transfer_s(10**7, others=1) == pytest.approx(0.01 * (1 + sharing), rel=0.15)


def test_the_meter_sees_what_overlaps() -> None:
    """Two that run at once all the time count as two each."""
    clock = Clock()
    meter = LinkMeter(clock)
    for _ in range(4):
        with meter.transfer() as outer:
            outer.was("peer", "t", 1000)
            with meter.transfer() as inner:
                inner.was("peer", "t", 1000)
                clock.now += 2.0
    speed = meter.speed("peer", "t")
    assert speed is not None
    assert speed.transfer_s(1000) == pytest.approx(1.0)
    assert speed.transfer_s(1000, others=1) == pytest.approx(2.0)


def test_a_failed_transfer_is_no_evidence() -> None:
    """Nor are one or two good ones."""
    link = Link(0.0, 1e9)
    with pytest.raises(OfferGone):
        link.fail(1000)
    link.move(1000)
    assert link.meter.speed("peer", "t") is None
