"""Blocks between workers: pulled, replicated, offered and dropped."""

from __future__ import annotations

import pytest

from conductor.core.events import (
    BlocksRemoved,
    BlocksStored,
    PrefillStarted,
    TransferFailed,
    TransferFinished,
)
from tests.workers.actor_doubles import (
    Cluster,
    make_job,
    place,
    until,
)
from tests.workers.doubles import expected_output
from tests.workers.worker_stage import OTHER, PROMPT, pair, run


async def test_a_prefix_is_pulled_and_kept(cluster: Cluster) -> None:
    """A pulled prefix is not computed again; its copy is reported, and serves the next request locally."""
    await pair(cluster)
    await cluster.add("p1")
    first = await run(cluster, "r1")
    for request_id, source in (("r2", "p0"), ("r3", None)):
        job = make_job(request_id, PROMPT)
        await cluster.submit(job, place(job, "p1", "d0", fetched=24 if source else 0, source=source))
        assert await cluster.output_of(request_id) == first
        assert cluster.outputs[request_id][0].reused_tokens == 24
    started = {event.request_id: event.fetch_s for event in cluster.conductor.of(PrefillStarted)}
    assert started["r2"] is not None
    assert started["r2"] > 0
    assert started["r3"] is None
    stored = [e for e in cluster.conductor.of(BlocksStored) if e.stamp.source == "p1"]
    assert stored[0].blocks[:6] == make_job("r2", PROMPT).request.block_hashes


@pytest.mark.parametrize("trouble", ["dead", "nothing held", "no such source"])
async def test_a_failed_pull_is_computed(cluster: Cluster, trouble: str) -> None:
    """A dead source, or one that has evicted the prefix, costs the computing and nothing else."""
    await pair(cluster)
    source = await cluster.add("p1")
    if trouble == "dead":
        cluster.handles["p1"].dead = True
    elif trouble == "no such source":
        del cluster.handles["p1"]
    assert source.cache.idle == 0
    job = make_job("r1", PROMPT)
    await cluster.submit(job, place(job, "p0", "d0", fetched=24, source="p1"))
    assert await cluster.output_of("r1") == expected_output(PROMPT, 8)
    assert cluster.outputs["r1"][0].reused_tokens == 0


async def test_a_prompt_does_not_wait_for_anothers_pull(cluster: Cluster) -> None:
    """While one prompt's prefix is on its way, the next is computed."""
    await pair(cluster)
    await cluster.add("p1")
    cluster.handles["p1"].hang = {"offer_blocks"}
    stuck = make_job("r1", PROMPT)
    await cluster.submit(stuck, place(stuck, "p0", "d0", fetched=24, source="p1"))
    assert await run(cluster, "r2", OTHER) == expected_output(OTHER, 8)
    await cluster.workers["p0"].cancel("r1", 1)
    assert (await cluster.workers["p0"].stats())["queued"] == 0


async def test_blocks_are_replicated_on_demand(cluster: Cluster) -> None:
    """`pull_blocks` copies a prefix and says so; what is here already is not sent again; a failure is told."""
    await pair(cluster)
    await cluster.add("p1")
    await run(cluster, "r1")
    hashes = make_job("r1", PROMPT).request.block_hashes
    target = cluster.workers["p1"]
    await target.pull_blocks("t1", cluster.handles["p0"], hashes[:2])
    await target.pull_blocks("t2", cluster.handles["p0"], hashes)
    await target.pull_blocks("t3", cluster.handles["p0"], hashes)
    await target.pull_blocks("t4", cluster.handles["p0"], (1, 2))
    await until(lambda: bool(cluster.conductor.of(TransferFailed)))
    sizes = [(event.transfer_id, event.transfer_bytes) for event in cluster.conductor.of(TransferFinished)]
    assert sizes == [("t1", 2 * 128), ("t2", 4 * 128), ("t3", 0)]
    assert [event.transfer_id for event in cluster.conductor.of(TransferFailed)] == ["t4"]
    assert target.cache.match(hashes) == 6


async def test_an_offer_pins_until_it_is_released(cluster: Cluster) -> None:
    """Offered blocks are pinned; releasing twice is harmless; an empty offer pins nothing."""
    await pair(cluster)
    await run(cluster, "r1")
    worker = cluster.workers["p0"]
    hashes = make_job("r1", PROMPT).request.block_hashes
    await until(lambda: worker.cache.pinned == 0)
    offer = await worker.offer_blocks((*hashes, 99), 1)
    (part,) = offer.parts
    assert (offer.blocks, offer.first, part.ticket.blocks, worker.cache.pinned) == (hashes, 1, 5, 6)
    assert await worker.offer_blocks((99,)) is None
    assert await worker.offer_blocks(hashes, 6) is None
    await worker.release_offer(offer.id)
    await worker.release_offer(offer.id)


async def test_an_offer_ends_with_its_lease(cluster: Cluster) -> None:
    """A target that never comes back cannot pin blocks for longer than the lease."""
    await cluster.add("p0", lease_s=0.2)
    await cluster.add("d0")
    await run(cluster, "r1")
    worker = cluster.workers["p0"]
    await until(lambda: worker.cache.pinned == 0)
    assert await worker.offer_blocks(make_job("r1", PROMPT).request.block_hashes) is not None
    assert worker.cache.pinned == 6
    await until(lambda: worker.cache.pinned == 0 and worker.transport.offered == 0)


async def test_dropped_blocks_go_first(cluster: Cluster) -> None:
    """Advice to drop makes a fresh prefix the first to be evicted, and the eviction is reported."""
    await pair(cluster, num_blocks=16)
    await run(cluster, "r1")
    await run(cluster, "r2", OTHER)
    worker = cluster.workers["p0"]
    dropped = make_job("r2", OTHER).request.block_hashes
    await worker.drop_blocks(dropped)
    await run(cluster, "r3", tuple(range(30)))
    await until(lambda: any(e.stamp.source == "p0" for e in cluster.conductor.of(BlocksRemoved)))
    removed = [block for e in cluster.conductor.of(BlocksRemoved) if e.stamp.source == "p0" for block in e.blocks]
    assert set(dropped) & set(removed)
    assert worker.cache.match(make_job("r1", PROMPT).request.block_hashes) == 6
