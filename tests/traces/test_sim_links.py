"""Links with fair shares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traces.sim_builders import options, profile, row, run, run_loop
from traces.sim.links import Link, Network
from traces.sim.loop import At, EventLoop


def test_two_flows_share_a_link_and_the_survivor_speeds_up() -> None:
    """100 B and 50 B over one link of 10 B/s: 5 B/s each until 10 s, then the rest alone until 15 s."""
    loop = EventLoop()
    network = Network(loop, latency_s=0.0, contention=True)
    link = Link("wire", 10.0)
    ends: dict[str, float] = {}
    for name, size in (("long", 100), ("short", 50)):
        network.start("test", (link,), size, lambda name: ends.update({name: loop.now}), name)
    run_loop(loop)
    assert {"short": pytest.approx(10.0), "long": pytest.approx(15.0)} == ends


def test_flow_runs_at_the_least_of_its_fair_shares() -> None:
    """Two senders into one receiver share its card, not their own."""
    loop = EventLoop()
    network = Network(loop, latency_s=0.5, contention=True)
    receiver = Link("in", 10.0)
    ends: list[float] = []
    for sender in (Link("a", 10.0), Link("b", 10.0)):
        network.start("test", (sender, receiver), 50, lambda: ends.append(loop.now))
    run_loop(loop)
    assert [pytest.approx(10.5)] * 2 == ends


def test_without_contention_every_flow_runs_at_full_speed() -> None:
    """Dynamo's mock engine counts transfers that way."""
    loop = EventLoop()
    network = Network(loop, latency_s=0.0, contention=False)
    link = Link("wire", 10.0)
    ends: list[float] = []
    for size in (100, 50):
        network.start("test", (link,), size, lambda: ends.append(loop.now))
    run_loop(loop)
    assert ends == [5.0, 10.0]


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 1000), st.integers(0, 2), st.integers(0, 2)), max_size=25),
    st.booleans(),
)
def test_bytes_are_conserved(flows: list[tuple[float, int, int, int]], contention: bool) -> None:
    """What was sent arrives once, and every link counts what crossed it."""
    loop = EventLoop()
    network = Network(loop, latency_s=0.01, contention=contention)
    outgoing = [Link(f"out{number}", 100.0) for number in range(3)]
    incoming = [Link(f"in{number}", 60.0) for number in range(3)]
    arrived: list[int] = []

    def send(size: int, source: int, target: int) -> None:
        network.start("test", (outgoing[source], incoming[target]), size, arrived.append, size)

    for at_s, size, source, target in flows:
        loop.at(at_s, At.ARRIVAL, send, size, source, target)
    run_loop(loop)
    total = sum(size for _, size, _, _ in flows)
    assert total == sum(arrived) == network.bytes_moved["test"]
    assert total == sum(link.bytes_moved for link in outgoing) == sum(link.bytes_moved for link in incoming)


def test_stopped_flow_counts_what_it_sent_and_does_not_arrive() -> None:
    """A node dies half way: half of the bytes crossed the link, and the other flow gets the whole of it."""
    loop = EventLoop()
    network = Network(loop, latency_s=0.0, contention=True)
    link = Link("wire", 10.0)
    arrived: list[tuple[str, float]] = []

    def note(name: str) -> None:
        arrived.append((name, loop.now))

    doomed = network.start("test", (link,), 100, note, "doomed")
    network.start("test", (link,), 100, note, "other")
    loop.at(10.0, At.COMPLETION, network.stop, doomed)
    run_loop(loop)
    assert [("other", pytest.approx(15.0))] == arrived
    assert network.bytes_moved["test"] == 150


def test_storage_reads_go_through_the_card_with_less_to_read() -> None:
    """Two prompts whose context lies in the shared store alone: dual path reads the second through a decode node's card."""
    tiers = {"shared": {"bytes_per_s": 1e12, "blocks": 1000}}
    network = {"nic_bytes_per_s": 50e9, "latency_s": 0.0, "contention": True}
    moved = {}
    for reads in ("prefill", "dual"):
        storage = {"nic_bytes_per_s": 5e9, "reads": reads}
        cluster = profile(tiers=tiers, network=network, storage=storage, prefill_blocks=80)
        first = [row(10.0 * number, 20_000, first_block=1000 * number) for number in range(4)]
        again = [row(40.0 + number / 100, 20_000, first_block=1000 * number) for number in range(2)]
        chosen = options(cluster, policy="kvcache_centric", prefill_workers=1)
        simulation, _ = run([*first, *again], chosen)
        moved[reads] = dict(simulation.cluster.network.bytes_moved)
    assert set(moved["prefill"]) == {"handover", "shared_restore"}
    assert set(moved["dual"]) == {"handover", "shared_restore", "shared_restore_relayed"}
    assert moved["prefill"]["shared_restore"] == moved["dual"]["shared_restore"] + moved["dual"]["shared_restore_relayed"]
