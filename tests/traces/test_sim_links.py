"""Links with fair shares."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.core.types import Placement
from tests.traces.sim_builders import options, profile, row, run, run_loop
from traces.sim.links import Link, Network
from traces.sim.loop import At, EventLoop
from traces.simulator import Outage, Simulation


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


def stored_contexts(reads: str = "other_host", *outages: Outage) -> Simulation:
    """Three prompts, read again at once when the shared store alone has them, while a long answer keeps a decode worker."""
    tiers = {"shared": {"bytes_per_s": 1e12, "blocks": 1000}}
    network = {"nic_bytes_per_s": 50e9, "latency_s": 0.0, "contention": True}
    cluster = profile(tiers=tiers, network=network, storage={"nic_bytes_per_s": 5e9}, prefill_blocks=80)
    first = [row(10.0 * number, 8_000, first_block=1000 * number) for number in range(3)]
    again = [row(40.0 + number / 100, 8_000, first_block=1000 * number) for number in range(3)]
    chosen = options(cluster, policy="kvcache_centric", prefill_workers=1, outages=outages)
    chosen = replace(chosen, scheduler=replace(chosen.scheduler, relayed_reads=reads))
    return run([*first, row(30.0, 40_000, output=3000, first_block=9000), *again], chosen)[0]


def placed(simulation: Simulation) -> list[Placement]:
    return [record.placement for record in simulation.records.values() if record.placement is not None]


def test_storage_reads_go_over_the_card_that_the_scheduler_chose() -> None:
    """The second and the third prompt are read over decode workers' cards, where that is allowed: one each."""
    direct, relayed = stored_contexts("never"), stored_contexts()
    assert [one.reuse.relay for one in placed(direct)] == [None] * 7
    relays = [one.reuse.relay for one in placed(relayed)[-3:]]
    assert relays[0] is None
    assert sorted(str(one) for one in relays[1:]) == ["decode-000", "decode-001"]
    before, after = direct.cluster.network.bytes_moved, relayed.cluster.network.bytes_moved
    assert set(before) == {"handover", "shared_restore"}
    assert before["shared_restore"] == after["shared_restore"] + after["shared_restore_relayed"]


def test_a_read_whose_relay_dies_begins_anew_over_the_own_card() -> None:
    """What was sent until then is lost, and nothing else: the request decodes elsewhere and never hears of it."""
    whole = stored_contexts()
    (third,) = [one for one in placed(whole) if one.reuse.relay not in (None, one.decode)]
    broken = stored_contexts("other_host", Outage(str(third.reuse.relay), 40.05))
    before, after = whole.cluster.network.bytes_moved, broken.cluster.network.bytes_moved
    assert after["shared_restore_relayed"] < before["shared_restore_relayed"]
    assert after["shared_restore"] > before["shared_restore"]
    assert broken.records[third.request_id].placement == third
    assert all(record.finished_s is not None for record in list(broken.records.values())[-3:])
