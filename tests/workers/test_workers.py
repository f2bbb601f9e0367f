"""The life of a request on prefill and decode workers: what comes out, what is reported, and that nothing is kept."""

from __future__ import annotations

import asyncio
import random
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

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
from tests.workers.doubles import expected_output
from tests.workers.worker_stage import OTHER, PROMPT, GatedModel, pair, run


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
