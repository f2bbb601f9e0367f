"""Requests that are cancelled, and workers that die, hang or have no room: nothing is kept, and nothing is lost silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from conductor.core.events import (
    RequestFailed,
)
from conductor.core.types import FinishReason
from tests.workers.actor_doubles import (
    Cluster,
    make_job,
    place,
    until,
)
from tests.workers.doubles import ChainModel, expected_output
from tests.workers.worker_stage import OTHER, PROMPT, GatedModel, pair, run
from workers.decode import DecodeWorker


async def test_cancel_in_the_middle_of_prefill(cluster: Cluster) -> None:
    """The prompt stops after the current chunk, no token comes, and all blocks are given back on both sides."""
    model = GatedModel()
    await cluster.add("p0", model=model)
    await cluster.add("d0")
    model.closed = True
    job = make_job("r1", PROMPT)
    await cluster.submit(job, place(job, "p0", "d0"))
    await model.until_entered()
    forwards = model.forwards
    await cluster.workers["p0"].cancel("r1", 1)
    await cluster.workers["d0"].cancel("r1", 1)
    model.let_through()
    await until(lambda: cluster.workers["p0"].cache.pinned == 0)
    assert model.forwards == forwards + 1
    assert [output.finish_reason for output in cluster.outputs["r1"]] == [FinishReason.CANCELLED]
    assert await run(cluster, "r2") == expected_output(PROMPT, 8)


async def test_cancel_in_the_middle_of_decode(cluster: Cluster) -> None:
    """A decoding sequence stops within one step while its neighbour goes on."""
    model = GatedModel()
    await cluster.add("p0")
    await cluster.add("d0", model=model)
    for request_id, tokens in (("r1", PROMPT), ("r2", OTHER)):
        job = make_job(request_id, tokens, 40)
        model.closed = True
        await cluster.submit(job, place(job, "p0", "d0"))
    await model.until_entered()
    await cluster.workers["d0"].cancel("r1", 1)
    model.let_through()
    assert await cluster.output_of("r2") == expected_output(OTHER, 40)
    assert cluster.outputs["r1"][-1].finish_reason is FinishReason.CANCELLED
    assert len(cluster.outputs["r1"]) < 5
    assert not cluster.conductor.of(RequestFailed)


async def test_cancel_before_the_hand_over_arrives(cluster: Cluster) -> None:
    """A hand-over of a request that was cancelled meanwhile is not taken; unknown ids are ignored."""
    await pair(cluster)
    await cluster.workers["d0"].cancel("r1", 1)
    await cluster.workers["p0"].cancel("unknown", 7)
    job = make_job("r1", PROMPT)
    await cluster.submit(job, place(job, "p0", "d0"))
    await until(lambda: bool(cluster.conductor.of(RequestFailed)))
    assert "cancelled or given up" in cluster.conductor.of(RequestFailed)[0].message
    assert (await cluster.workers["d0"].stats())["running"] == 0
    assert cluster.workers["d0"].cache.pinned == 0


async def test_cancel_while_queued_and_while_handing_over(cluster: Cluster) -> None:
    """A queued prompt leaves the queue at once; one that waits for a decode worker lets its blocks go."""
    await pair(cluster)
    job = make_job("r1", PROMPT)
    await cluster.submit(job, place(job, "p0", None))
    await until(lambda: len(cluster.outputs.get("r1", ())) == 1)
    assert cluster.workers["p0"].cache.pinned == 7
    await cluster.workers["p0"].cancel("r1", 1)
    await until(lambda: cluster.workers["p0"].cache.pinned == 0)
    await cluster.workers["p0"].choose_decode("r1", 1, "d0", cluster.handles["d0"])
    assert cluster.handles["d0"].calls == []


async def test_a_decode_worker_that_dies_fails_the_request(cluster: Cluster) -> None:
    """The prefill worker names the dead peer, gives everything back, and goes on with others."""
    await pair(cluster)
    await cluster.add("d1")
    cluster.handles["d1"].dead = True
    job = make_job("r1", PROMPT)
    await cluster.submit(job, place(job, "p0", "d1"))
    await until(lambda: bool(cluster.conductor.of(RequestFailed)))
    (failed,) = cluster.conductor.of(RequestFailed)
    assert (failed.request_id, failed.worker_id) == ("r1", "d1")
    assert "dead" in failed.message
    assert await run(cluster, "r2") == expected_output(PROMPT, 8)


async def test_a_decode_worker_that_hangs_fails_the_request(cluster: Cluster) -> None:
    """A hand-over that does not end within the lease is given up."""
    await cluster.add("p0", lease_s=0.3)
    await cluster.add("d0")
    cluster.handles["d0"].hang = {"receive_parts", "accept_handover"}
    job = make_job("r1", PROMPT)
    await cluster.submit(job, place(job, "p0", "d0"))
    await until(lambda: bool(cluster.conductor.of(RequestFailed)))
    assert "lease_s" in cluster.conductor.of(RequestFailed)[0].message


async def test_a_prefill_worker_that_dies_leaves_nothing_on_the_decode_side(cluster: Cluster) -> None:
    """KV whose bytes are gone is refused as a whole, and the blocks reserved for it are free again."""
    await pair(cluster)
    cluster.handles["d0"].hang = {"accept_handover", "receive_parts"}
    job = make_job("r1", PROMPT)
    placement = place(job, "p0", "d0")
    await cluster.submit(job, placement)
    await until(lambda: "accept_handover" in cluster.handles["d0"].calls)
    worker = cluster.workers["p0"]
    (entry,) = worker._entries.values()
    assert entry.outgoing is not None
    parts = await entry.outgoing.rest()
    cluster.fabric.clear()
    with pytest.raises(Exception, match="released"):
        await cluster.workers["d0"].accept_handover(job, placement, cluster.outputs["r1"][0], parts)
    assert cluster.workers["d0"].cache.pinned == 0
    assert cluster.workers["d0"].cache.idle == 0
    await worker.cancel("r1", 1)


async def outlast_its_lease(cluster: Cluster) -> tuple[GatedModel, DecodeWorker]:
    """A hand-over whose first parts have come, and been let go of, while its prompt `r1` still computes."""
    model = GatedModel()
    await cluster.add("p0", model=model)
    decode = await cluster.add("d0", lease_s=0.3)
    model.closed = True
    job = make_job("r1", PROMPT)
    await cluster.submit(job, place(job, "p0", "d0"))
    await model.until_entered()
    model.gate.release()
    await until(lambda: decode.cache.pinned > 0)
    await until(lambda: decode.cache.pinned == 0)
    return model, decode


async def test_an_unfinished_hand_over_ends_with_its_lease(cluster: Cluster) -> None:
    """Early parts of a prompt whose prefill worker went silent do not hold blocks for ever."""
    model, decode = await outlast_its_lease(cluster)
    assert (await decode.stats())["queued"] == 0
    await cluster.workers["p0"].cancel("r1", 1)
    model.let_through()


async def test_a_hand_over_that_was_given_up_is_not_lost_silently(cluster: Cluster) -> None:
    """When the decode side has let go of a prompt that took too long, the prefill side learns it and reports the failure."""
    model, _ = await outlast_its_lease(cluster)
    model.let_through()
    await until(lambda: bool(cluster.conductor.of(RequestFailed)))
    assert cluster.conductor.of(RequestFailed)[0].worker_id == "d0"


async def test_parts_whose_lease_runs_out_are_offered_again(cluster: Cluster) -> None:
    """A prompt that takes longer than a lease is handed over all the same, although its early parts were never fetched."""
    model = GatedModel()
    prefill = await cluster.add("p0", model=model, lease_s=1.0)
    await cluster.add("d0")
    model.closed = True
    job = make_job("r1", PROMPT)
    await cluster.submit(job, place(job, "p0", None))
    await model.until_entered()
    model.gate.release()
    await until(lambda: prefill.transport.offered == 1)
    await until(lambda: prefill.transport.offered == 0)
    model.let_through()
    await prefill.choose_decode("r1", 1, "d0", cluster.handles["d0"])
    assert await cluster.output_of("r1") == expected_output(PROMPT, 8)


async def test_prompts_wait_for_blocks(cluster: Cluster) -> None:
    """More prompts than fit at once are computed one after the other, none is lost."""
    await cluster.add("p0", num_blocks=8)
    await cluster.add("d0", num_blocks=64)
    jobs = [make_job(f"r{i}", (i, *PROMPT[:-1])) for i in range(5)]
    for job in jobs:
        await cluster.submit(job, place(job, "p0", "d0"))
    for i in range(5):
        assert await cluster.output_of(f"r{i}") == expected_output((i, *PROMPT[:-1]), 8)


async def test_decode_survives_a_pool_that_is_too_small(cluster: Cluster) -> None:
    """Sequences that outgrow the pool together take turns by preemption, and every output is exact."""
    await cluster.add("p0")
    decode = await cluster.add("d0", num_blocks=12)
    prompts = {f"r{i}": (i, *OTHER) for i in range(4)}
    for request_id, tokens in prompts.items():
        job = make_job(request_id, tokens, 24)
        await cluster.submit(job, place(job, "p0", "d0"))
    for request_id, tokens in prompts.items():
        assert await cluster.output_of(request_id) == expected_output(tokens, 24)
    assert decode.preemptions > 0


async def test_a_sequence_ends_where_the_pool_ends(cluster: Cluster) -> None:
    """A lone sequence that fills the whole pool is cut there, with the reason LENGTH."""
    await cluster.add("p0")
    await cluster.add("d0", num_blocks=8)
    output = await run(cluster, "r1", PROMPT, max_tokens=100)
    assert output == expected_output(PROMPT, 6)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (make_job("r1", range(4000)), "can hold at most"),
        (make_job("r1", (5000,)), "token ids must lie in"),
        (make_job("r1", ()), "prompt_tokens is 0"),
    ],
    ids=["too long", "foreign token", "empty"],
)
async def test_a_job_that_can_never_run_fails_at_once(cluster: Cluster, job: Any, message: str) -> None:
    """The failure names what is wrong and what is allowed."""
    await pair(cluster)
    await cluster.submit(job, place(job, "p0", "d0"))
    await until(lambda: bool(cluster.conductor.of(RequestFailed)))
    assert message in cluster.conductor.of(RequestFailed)[0].message
    assert cluster.outputs["r1"][0].finish_reason is FinishReason.FAILED


async def test_a_broken_kernel_fails_its_request_only(cluster: Cluster) -> None:
    """An error in the model is reported; the worker goes on."""

    class Fragile(ChainModel):
        broken = False

        def forward(self, *args: Any, on_layer: Callable[[int], None] | None = None) -> Tensor:
            if self.broken:
                raise RuntimeError("out of luck")
            return super().forward(*args, on_layer=on_layer)

    model = Fragile()
    await cluster.add("p0", model=model)
    await cluster.add("d0")
    model.broken = True
    job = make_job("r1", PROMPT)
    await cluster.submit(job, place(job, "p0", "d0"))
    await until(lambda: bool(cluster.conductor.of(RequestFailed)))
    assert "out of luck" in cluster.conductor.of(RequestFailed)[0].message
    model.broken = False
    assert await run(cluster, "r2") == expected_output(PROMPT, 8)
