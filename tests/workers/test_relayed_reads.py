"""A decode worker reads the shared store for a prefill worker: the same answers, and on bad days the prefill worker reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from conductor.core.types import SHARED_STORE, Tier
from tests.workers.actor_doubles import Cluster, make_job, place, until
from tests.workers.doubles import expected_output
from tests.workers.test_tiers import BLOCKS, PROMPT, REUSED, filled, join, leave
from workers.kv_store.settings import StoreSettings


@pytest.fixture
def store(tmp_path: Path) -> StoreSettings:
    return StoreSettings(
        deployment=f"test-{uuid4().hex}",
        shared_paths=(str(tmp_path / "shared"),),
        shared_bytes=1 << 20,
        report_interval_s=0.02,
    )


@pytest.fixture
async def cluster(store: StoreSettings) -> AsyncIterator[Cluster]:
    """The shared store has the prompt. `p1` and the decode workers `d0` and `d1` can read it, and hold nothing yet."""
    cluster = Cluster()
    await filled(cluster, store)
    for gone in ("p0", "d0"):
        await until(lambda gone=gone: cluster.workers[gone].cache.pinned == 0)
        await leave(cluster, gone)
    for worker_id in ("p1", "d0", "d1"):
        await join(cluster, worker_id, store=store)
    yield cluster
    await cluster.close()


async def begin(cluster: Cluster, relay: str, name: str = "r1") -> None:
    job = make_job(name, PROMPT)
    plan = place(job, "p1", "d0", fetched=REUSED, source=SHARED_STORE, tier=Tier.SHARED, relay=relay)
    await cluster.submit(job, plan)


async def ask(cluster: Cluster, relay: str) -> tuple[int | None, dict[str, Any]]:
    """Reused tokens of an answer, which must be right, and what the prefill worker counts."""
    await begin(cluster, relay)
    assert await cluster.output_of("r1") == expected_output(PROMPT, 8)
    return cluster.outputs["r1"][0].reused_tokens, await cluster.workers["p1"].stats()


def hits(cluster: Cluster, worker_id: str) -> int:
    (tier,) = cluster.workers[worker_id].store.tiers.values()
    return int(tier.stats().hits)


@pytest.mark.parametrize("relay", ["d0", "d1"])
async def test_the_prefix_comes_through_the_relay(cluster: Cluster, relay: str) -> None:
    """Read there, pulled from there; the prefill worker's own link carries nothing."""
    reused, stats = await ask(cluster, relay)
    assert (reused, stats["relayed_reads"], stats["failed_relays"]) == (REUSED, 1, 0)
    assert (hits(cluster, relay), hits(cluster, "p1")) == (BLOCKS, 0)


async def test_what_the_requests_own_decode_worker_has_read_is_not_sent_to_it_again(cluster: Cluster) -> None:
    """Only the new KV is handed over."""
    await ask(cluster, "d0")
    fetched = [offer for offer in cluster.handles["d0"].calls if offer == "offer_blocks"]
    assert len(fetched) == 1
    job = make_job("r2", PROMPT)
    assert await cluster.workers["d0"].receive_parts(job, place(job, "p1", "d0"), []) == BLOCKS
    await cluster.workers["d0"].cancel("r2", 1)


@pytest.mark.parametrize("trouble", ["dead", "gone", "hangs", "has no room", "has nothing"])
async def test_without_its_relay_a_worker_reads_by_itself(cluster: Cluster, trouble: str) -> None:
    """Whatever became of the relay: the prefix comes from the store all the same."""
    if trouble == "dead":
        cluster.handles["d1"].dead = True
    elif trouble == "gone":
        del cluster.handles["d1"]
    elif trouble == "hangs":
        cluster.handles["d1"].hang = {"offer_blocks"}
        cluster.workers["p1"].config = replace(cluster.workers["p1"].config, lease_s=3.0)
    elif trouble == "has no room":
        held = cluster.workers["d1"].cache.reserve((), 64)
    else:
        cluster.workers["d1"].store.tiers = {}
    reused, stats = await ask(cluster, "d1")
    assert (reused, stats["relayed_reads"], stats["failed_relays"]) == (REUSED, 0, 1)
    assert hits(cluster, "p1") == BLOCKS
    if trouble == "has no room":
        cluster.workers["d1"].cache.release(held[0])


async def test_a_relay_that_has_half_of_it_leaves_the_rest_to_the_target(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it offered is kept, what it did not is read."""
    relay = cluster.workers["d1"]
    offer = relay.offer_blocks

    async def half(blocks: tuple[int, ...], *rest: Any) -> Any:
        return await offer(blocks[: BLOCKS // 2], *rest)

    monkeypatch.setattr(relay, "offer_blocks", half)
    reused, stats = await ask(cluster, "d1")
    assert (reused, stats["relayed_reads"]) == (REUSED, 1)
    assert hits(cluster, "p1") == BLOCKS - BLOCKS // 2


async def test_a_request_that_is_cancelled_in_a_relayed_read_leaves_nothing_behind(cluster: Cluster) -> None:
    """`Cluster.close` counts blocks and offers."""
    cluster.handles["d1"].hang = {"offer_blocks"}
    await begin(cluster, "d1", "gone")
    await until(lambda: "offer_blocks" in cluster.handles["d1"].calls)
    await cluster.workers["p1"].cancel("gone", 1)
    cluster.handles["d1"].hang = set()
    await asyncio.sleep(0)
    reused, _ = await ask(cluster, "d1")
    assert reused == REUSED
