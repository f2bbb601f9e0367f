"""Prefill and decode workers together, without Ray: what comes out, what is reported, and that nothing is kept."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from torch import Tensor

from conductor.core.events import (
    BlocksRemoved,
    BlocksStored,
    FirstToken,
    HandoverFinished,
    IndexSnapshot,
    LoadReported,
    PrefillFinished,
    PrefillStarted,
    RequestFailed,
    RequestFinished,
    TransferFailed,
    TransferFinished,
)
from conductor.core.types import FinishReason, Role, Stamp, Tier
from tests.workers.actor_doubles import (
    CHANNEL,
    Cluster,
    Handle,
    PeerDied,
    RecordingConductor,
    make_job,
    place,
    until,
    with_sampling,
)
from tests.workers.doubles import ChainModel, expected_output

PROMPT = tuple((7 * i) % 91 for i in range(26))
OTHER = tuple((5 * i + 3) % 89 for i in range(14))


class GatedModel(ChainModel):
    """Holds every forward pass until it is let through; `entered` tells that one is waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def forward(self, *args: Any, on_layer: Callable[[int], None] | None = None) -> Tensor:
        if self.closed:
            self.entered.release()
            assert self.gate.acquire(timeout=20)
        return super().forward(*args, on_layer=on_layer)

    def let_through(self) -> None:
        self.closed = False
        for _ in range(100):
            self.gate.release()

    async def until_entered(self) -> None:
        await asyncio.to_thread(self.entered.acquire, timeout=20)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


async def pair(cluster: Cluster, **changes: Any) -> None:
    await cluster.add("p0", **changes)
    await cluster.add("d0", **changes)


async def run(cluster: Cluster, request_id: str, tokens: tuple[int, ...] = PROMPT, max_tokens: int = 8) -> list[int | None]:
    job = make_job(request_id, tokens, max_tokens)
    await cluster.submit(job, place(job, "p0", "d0"))
    return await cluster.output_of(request_id)


# --- the ordinary life of a request -----------------------------------------------------------------------------------


async def test_a_request_passes_from_prefill_to_decode(cluster: Cluster) -> None:
    """The output is the model's own; the first token comes from the prefill worker, the others from the decode worker."""
    await pair(cluster)
    assert expected_output(PROMPT, 8) == await run(cluster, "r1")
    outputs = sorted(cluster.outputs["r1"], key=lambda output: output.index)
    assert [output.index for output in outputs] == list(range(8))
    assert [output.worker for output in outputs] == ["p0"] + ["d0"] * 7
    assert [output.finish_reason for output in outputs] == [None] * 7 + [FinishReason.LENGTH]
    assert [output.reused_tokens for output in outputs] == [0] + [None] * 7


async def test_a_request_is_reported_from_start_to_end(cluster: Cluster) -> None:
    """Every step is an event; the last one tells how long the output was."""
    await pair(cluster)
    await run(cluster, "r1")
    await until(lambda: bool(cluster.conductor.of(RequestFinished)))
    told = cluster.conductor
    assert told.of(PrefillStarted) == [PrefillStarted("r1", 1, "p0")]
    (finished,) = told.of(PrefillFinished)
    assert (finished.reused_tokens, finished.warmup) == (0, True)
    assert finished.compute_s > 0
    assert told.of(FirstToken) == [FirstToken("r1", 1)]
    (handed,) = told.of(HandoverFinished)
    assert handed.transfer_bytes == 7 * 4 * 32
    assert told.of(RequestFinished) == [RequestFinished("r1", 1, 8, FinishReason.LENGTH)]


async def test_stored_blocks_are_reported_with_gapless_stamps(cluster: Cluster) -> None:
    """After the snapshot come the prompt's blocks, on both workers; sequences count from 1 without gaps."""
    await pair(cluster)
    job = make_job("r1", PROMPT)
    await run(cluster, "r1")
    await until(lambda: len({e.stamp.source for e in cluster.conductor.of(BlocksStored)}) == 2)
    for source in ("p0", "d0"):
        stamped = [e for e in cluster.conductor.events if isinstance(e, IndexSnapshot | BlocksStored | BlocksRemoved)]
        mine = [event for event in stamped if event.stamp.source == source]
        assert [event.stamp.seq for event in mine] == list(range(1, len(mine) + 1))
        assert mine[0] == IndexSnapshot(Stamp(source, 1, 1), {Tier.DEVICE: ()})
        stored = [block for event in mine if isinstance(event, BlocksStored) for block in event.blocks]
        assert tuple(stored[:6]) == job.request.block_hashes


async def test_a_repeated_prefix_is_reused_and_said_so(cluster: Cluster) -> None:
    """The second request computes only what is new, answers the same, and reports what it really reused."""
    await pair(cluster)
    first = await run(cluster, "r1")
    assert await run(cluster, "r2") == first
    assert cluster.outputs["r2"][0].reused_tokens == 24
    await until(lambda: len(cluster.conductor.of(PrefillFinished)) == 2)
    assert [event.reused_tokens for event in cluster.conductor.of(PrefillFinished)] == [0, 24]


async def test_the_next_turn_reuses_the_answer_on_the_decode_worker(cluster: Cluster) -> None:
    """The decode worker has prompt and answer cached; a prefill worker can pull them from there."""
    await pair(cluster)
    answer = [token for token in await run(cluster, "r1", max_tokens=12) if token is not None]
    following = make_job("r2", (*PROMPT, *answer, 1, 2, 3))
    placement = place(following, "p0", "d0", fetched=36, source="d0")
    await cluster.submit(following, placement)
    assert await cluster.output_of("r2") == expected_output((*PROMPT, *answer, 1, 2, 3), 8)
    assert cluster.outputs["r2"][0].reused_tokens == 36


async def test_many_requests_at_once(cluster: Cluster) -> None:
    """Prompts queue, decode is batched beyond its seats, and every output is right."""
    await pair(cluster, max_batch=3)
    prompts = {f"r{i}": PROMPT[: 5 + 2 * i] for i in range(9)}
    jobs = [make_job(request_id, tokens, 6) for request_id, tokens in prompts.items()]
    for job in jobs:
        await cluster.submit(job, place(job, "p0", "d0"))
    for request_id, tokens in prompts.items():
        assert await cluster.output_of(request_id) == expected_output(tokens, 6)


async def test_one_token_is_never_handed_over(cluster: Cluster) -> None:
    """A request that ends with its first token ends on the prefill worker."""
    await pair(cluster)
    assert await run(cluster, "r1", max_tokens=1) == expected_output(PROMPT, 1)
    await until(lambda: bool(cluster.conductor.of(RequestFinished)))
    assert cluster.conductor.of(RequestFinished) == [RequestFinished("r1", 1, 1, FinishReason.LENGTH)]
    assert cluster.handles["d0"].calls == []


async def test_a_stop_token_ends_the_output(cluster: Cluster) -> None:
    """First or later, a stop token is the last output; early parts on the decode worker are let go."""
    await pair(cluster)
    output = expected_output(PROMPT, 8)
    for request_id, last in (("r1", 0), ("r2", 3)):
        job = with_sampling(make_job(request_id, PROMPT), stop_token_ids=(output[last],))
        await cluster.submit(job, place(job, "p0", "d0"))
        assert await cluster.output_of(request_id) == output[: last + 1]
        assert cluster.outputs[request_id][-1].finish_reason is FinishReason.STOP


async def test_a_continuation_goes_on_where_it_was(cluster: Cluster) -> None:
    """After a lost worker the prompt contains what was emitted: indexes continue, and `max_tokens` counts the whole output."""
    await pair(cluster)
    output = expected_output(PROMPT, 8)
    job = make_job("r1", (*PROMPT, *output[:3]), 8, emitted=3, attempt=2)
    await cluster.submit(job, place(job, "p0", "d0"))
    assert await cluster.output_of("r1") == output[3:]
    assert sorted(output.index for output in cluster.outputs["r1"]) == [3, 4, 5, 6, 7]
    await until(lambda: cluster.conductor.of(RequestFinished) == [RequestFinished("r1", 2, 8, FinishReason.LENGTH)])


async def test_finished_chunks_move_while_the_next_computes(cluster: Cluster) -> None:
    """The decode worker gets early parts; only the last chunk's KV moves after the first token."""
    model = GatedModel()
    await cluster.add("p0", model=model)
    await cluster.add("d0")
    job = make_job("r1", PROMPT)
    model.closed = True
    await cluster.submit(job, place(job, "p0", "d0"))
    await model.until_entered()
    model.gate.release()
    await model.until_entered()
    await until(lambda: "receive_parts" in cluster.handles["d0"].calls)
    assert "r1" not in cluster.outputs
    model.let_through()
    assert await cluster.output_of("r1") == expected_output(PROMPT, 8)


async def test_what_the_decode_worker_holds_is_not_offered(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt that both workers have cached, only the KV of its last, unfinished block leaves the source."""
    await pair(cluster)
    first = await run(cluster, "r1")
    transport = cluster.workers["p0"].transport
    offer = Mock(side_effect=transport.offer)
    monkeypatch.setattr(transport, "offer", offer)
    assert await run(cluster, "r2") == first
    assert {len(call.args[0].ids) for call in offer.call_args_list} == {1}


async def test_a_prefix_is_sent_when_the_decode_worker_does_not_say_what_it_holds(cluster: Cluster) -> None:
    """The question is lost, the hand-over is not."""
    await pair(cluster)
    first = await run(cluster, "r1")
    cluster.workers["d0"].receive_parts = AsyncMock(side_effect=PeerDied("receive_parts"))
    assert await run(cluster, "r2") == first


async def test_the_decode_worker_may_be_chosen_late(cluster: Cluster) -> None:
    """The first token does not wait for the choice; the hand-over does."""
    await pair(cluster)
    job = make_job("r1", PROMPT)
    await cluster.submit(job, place(job, "p0", None))
    await until(lambda: len(cluster.outputs.get("r1", ())) == 1)
    await cluster.workers["p0"].choose_decode("r1", 1, "d0", cluster.handles["d0"])
    assert await cluster.output_of("r1") == expected_output(PROMPT, 8)


async def test_duplicate_calls_change_nothing(cluster: Cluster) -> None:
    """The same attempt is prefilled and adopted once, while it runs and after it has ended."""
    await pair(cluster)
    job = make_job("r1", PROMPT)
    placement = place(job, "p0", "d0")
    await cluster.submit(job, placement)
    await cluster.submit(job, placement)
    await cluster.output_of("r1")
    await cluster.submit(job, placement)
    await cluster.workers["d0"].accept_handover(job, placement, cluster.outputs["r1"][0], [])
    await asyncio.sleep(0.1)
    assert len(cluster.outputs["r1"]) == 8
    assert len(cluster.conductor.of(PrefillFinished)) == 1


async def test_a_worker_describes_itself(cluster: Cluster) -> None:
    """Role, capacity and profile are those of its configuration."""
    await cluster.add("p0", node="host-1", rack="r", zone="z")
    spec = await cluster.workers["p0"].describe()
    assert (spec.id, spec.role, spec.node, spec.rack, spec.zone) == ("p0", Role.PREFILL, "host-1", "r", "z")
    assert spec.capacity_blocks == {Tier.DEVICE: 64}
    assert spec.model == "chain"


# --- pulls ------------------------------------------------------------------------------------------------------------


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
    assert (offer.blocks, offer.first, offer.ticket.blocks, worker.cache.pinned) == (hashes, 1, 5, 6)
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


# --- cancellation -----------------------------------------------------------------------------------------------------


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


# --- bad days ---------------------------------------------------------------------------------------------------------


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


async def test_an_unfinished_hand_over_ends_with_its_lease(cluster: Cluster) -> None:
    """Early parts of a prompt whose prefill worker went silent do not hold blocks for ever."""
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
    assert (await decode.stats())["queued"] == 0
    await cluster.workers["p0"].cancel("r1", 1)
    model.let_through()


async def test_a_hand_over_that_was_given_up_is_not_lost_silently(cluster: Cluster) -> None:
    """When the decode side has let go of a prompt that took too long, the prefill side learns it and reports the failure."""
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


# --- reporting and outputs --------------------------------------------------------------------------------------------


async def test_a_lost_conductor_does_not_stop_the_work(cluster: Cluster) -> None:
    """While nobody takes reports the request goes on; the next attach gets a snapshot and what happened to requests."""
    await pair(cluster)
    await cluster.add("p1", read=True)
    worker = cluster.workers["p1"]
    conductor = Handle(RecordingConductor())
    conductor.dead = True
    await worker.attach(conductor, 2)
    job = make_job("r1", PROMPT)
    await cluster.submit(job, place(job, "p1", "d0"))
    assert await cluster.output_of("r1") == expected_output(PROMPT, 8)
    assert not (await worker.stats())["attached"]
    again = RecordingConductor()
    await worker.attach(Handle(again), 3)
    await until(lambda: bool(again.of(PrefillFinished)))
    (snapshot,) = again.of(IndexSnapshot)
    assert snapshot == IndexSnapshot(Stamp("p1", 3, 1), {Tier.DEVICE: job.request.block_hashes})
    assert not again.of(BlocksStored)


async def test_a_snapshot_is_reported_when_asked_for(cluster: Cluster) -> None:
    """A gap on the Conductor's side is closed by everything the worker holds, under the next stamp."""
    await pair(cluster)
    await run(cluster, "r1", max_tokens=1)
    await cluster.workers["p0"].snapshot()
    await until(lambda: len([e for e in cluster.conductor.of(IndexSnapshot) if e.stamp.source == "p0"]) == 2)
    last = [event for event in cluster.conductor.of(IndexSnapshot) if event.stamp.source == "p0"][-1]
    assert last.blocks[Tier.DEVICE] == make_job("r1", PROMPT).request.block_hashes


async def test_load_is_reported_when_it_changes(cluster: Cluster) -> None:
    """Queue and blocks reach the Conductor while a prompt computes, and return to nothing."""
    model = GatedModel()
    await cluster.add("p0", model=model)
    await cluster.add("d0")
    model.closed = True
    for request_id, tokens in (("r1", PROMPT), ("r2", OTHER)):
        job = make_job(request_id, tokens, 1)
        await cluster.submit(job, place(job, "p0", "d0"))
    await model.until_entered()
    await until(lambda: any(e.load.queued_prefill_tokens == len(OTHER) for e in cluster.conductor.of(LoadReported)))
    assert any(event.load.running_prefill_remaining_s > 0 for event in cluster.conductor.of(LoadReported))
    model.let_through()
    await cluster.output_of("r2")
    mine = [event.load for event in cluster.conductor.of(LoadReported) if event.worker_id == "p0"]
    await until(lambda: mine[-1].queued_requests <= 1)


async def test_unread_output_waits_for_its_consumer(cluster: Cluster) -> None:
    """A gateway that connects late, or again, gets everything; the second consumer ends the first."""
    await cluster.add("p0", read=False)
    await cluster.add("d0", read=False)
    job = make_job("r1", PROMPT, 6)
    await cluster.submit(job, place(job, "p0", "d0"))
    decode = cluster.workers["d0"]
    await until(lambda: decode._channels.unread == 5)
    first = decode.outputs(CHANNEL)
    taken = await anext(first)
    second = decode.outputs(CHANNEL)
    assert await anext(second) == taken
    assert [output async for output in first] == []
    await second.aclose()


async def test_an_abandoned_channel_fails_its_requests(cluster: Cluster) -> None:
    """Output that nobody reads is bounded: beyond it the request fails, instead of the worker's memory."""
    await cluster.add("p0", read=False)
    await cluster.add("d0", read=False, max_unread_outputs=3)
    job = make_job("r1", PROMPT, 50)
    await cluster.submit(job, place(job, "p0", "d0"))
    await until(lambda: bool(cluster.conductor.of(RequestFailed)))
    assert "nobody reads" in cluster.conductor.of(RequestFailed)[0].message


async def test_alive_never_returns(cluster: Cluster) -> None:
    """The watch on a worker ends only with the worker."""
    await cluster.add("p0")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await cluster.workers["p0"].alive()


@pytest.mark.parametrize("seed", range(4))
async def test_random_traffic_over_tiny_pools_leaves_nothing(cluster: Cluster, seed: int) -> None:
    """Shared prefixes, pulls, cancels at any moment and pools that always evict: exact outputs, and no block stays pinned."""
    draw = random.Random(seed)
    for worker_id, blocks in (("p0", 16), ("p1", 16), ("d0", 20)):
        await cluster.add(worker_id, num_blocks=blocks, max_batch=3)
    jobs = {}
    for number in range(24):
        shared = (PROMPT, OTHER)[draw.randrange(2)][: draw.randint(1, 26)]
        job = make_job(f"r{number}", (*shared, *(draw.randrange(900) for _ in range(draw.randint(0, 9)))), draw.randint(1, 20))
        prefill, peer = draw.sample(["p0", "p1"], 2)
        fetched = len(job.request.block_hashes) * 4 if draw.random() < 0.5 else 0
        jobs[job.request.id] = job
        await cluster.submit(
            job, place(job, prefill, "d0", fetched=fetched, source=draw.choice([peer, "d0"]) if fetched else None)
        )
        await asyncio.sleep(draw.random() * 0.02)
        if draw.random() < 0.4:
            victim = f"r{draw.randint(0, number)}"
            for worker in cluster.workers.values():
                await worker.cancel(victim, 1)
            jobs.pop(victim, None)
    for request_id, job in jobs.items():
        tokens = np.frombuffer(job.tokens, dtype="<i4").tolist()
        assert await cluster.output_of(request_id) == expected_output(tokens, job.sampling.max_tokens)
    assert not [event for event in cluster.conductor.of(RequestFailed) if event.request_id in jobs]
