"""The live driver: events in one at a time, commands out as worker calls, reports back as events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from conductor.cluster import ConductorActor
from conductor.core import commands as cmd
from conductor.core import events as ev
from conductor.core.config import SchedulerConfig
from conductor.core.types import SHARED_STORE, FinishReason, Holder, ReusePlan, Stamp, Tier, WorkerLoad
from conductor.notices import RejectionNotice
from conductor.runtime import ConductorRuntime, DuplicateRequestError, RequestCancelledError
from tests.conductor.doubles import FakeWorker, ScriptedScheduler, job, placement, rejection, spec
from tests.conductor.stage import TRANSFER, Stage, notices_of, place_arrivals

pytestmark = pytest.mark.usefixtures("quiet")


async def test_a_worker_joins_is_attached_and_is_in_the_status(stage: Stage) -> None:
    """A joined worker is known to the scheduler under the epoch that it was told."""
    joined = stage.scheduler.seen(ev.WorkerJoined)
    assert [event.worker.id for event in joined] == ["p0", "d0"]
    assert stage.p0.called("attach") == [("conductor", joined[0].epoch)]
    assert joined[1].epoch > joined[0].epoch
    status = await stage.runtime.status()
    assert (status.ready, status.reason, status.model) == (True, "serving", "tiny")
    assert status.workers["d0"]["role"] == "decode"


async def test_a_placed_request_reaches_its_prefill_worker_with_its_peers(stage: Stage) -> None:
    """submit returns the placement, and the payload goes to the worker with the decode worker's handle."""
    decision = await stage.runtime.submit(job())
    await stage.settle()
    assert decision == placement()
    assert stage.p0.called("prefill") == [(job(), placement(), stage.d0, None)]


async def test_a_rejected_request_is_told_and_forgotten(stage: Stage) -> None:
    """submit returns the rejection, and the same id may come again."""
    stage.scheduler.answer = lambda event: [cmd.Reject(rejection())]
    assert await stage.runtime.submit(job()) == rejection()
    assert await stage.runtime.submit(job()) == rejection()
    assert (await stage.runtime.status()).counters["in_flight"] == 0


async def test_submit_waits_for_late_binding(stage: Stage) -> None:
    """A decision that comes with a later event resolves the submission."""
    stage.scheduler.answer = lambda event: []
    waiting = asyncio.create_task(stage.runtime.submit(job()))
    await stage.settle()
    assert not waiting.done()
    await stage.deliver(ev.Tick(), cmd.StartPrefill(placement()))
    assert await waiting == placement()


async def test_a_request_id_in_flight_is_refused(stage: Stage) -> None:
    """Two requests never share an id."""
    await stage.runtime.submit(job())
    with pytest.raises(DuplicateRequestError, match="request id 'r1' is not allowed"):
        await stage.runtime.submit(job())


async def test_cancel_reaches_every_worker_of_the_request(stage: Stage) -> None:
    """The scheduler names the workers; each is told."""
    await stage.runtime.submit(job())
    cancel = cmd.Cancel("r1", 1, ("p0", "d0"))
    stage.scheduler.answer = lambda event: [cancel] if isinstance(event, ev.RequestCancelled) else []
    await stage.runtime.cancel("r1")
    await stage.settle()
    assert stage.p0.called("cancel") == stage.d0.called("cancel") == [("r1", 1)]
    assert (await stage.runtime.status()).counters["in_flight"] == 0


async def test_cancelling_an_unplaced_request_ends_its_submission(stage: Stage) -> None:
    """Whoever waits for the decision learns that there will be none."""
    stage.scheduler.answer = lambda event: []
    waiting = asyncio.create_task(stage.runtime.submit(job()))
    await stage.settle()
    await stage.runtime.cancel("r1")
    with pytest.raises(RequestCancelledError, match="'r1' was cancelled"):
        await waiting


async def test_cancelling_an_unknown_request_is_nothing(stage: Stage) -> None:
    """The scheduler is not bothered with requests that are not in flight."""
    await stage.runtime.cancel("never seen")
    await stage.settle()
    assert stage.scheduler.seen(ev.RequestCancelled) == []


async def test_a_late_rejection_is_a_notice(stage: Stage) -> None:
    """A request that had been placed and is refused afterwards is told on its channel, and forgotten."""
    received, task = await notices_of(stage)
    await stage.runtime.submit(job())
    await stage.deliver(ev.Tick(), cmd.Reject(rejection()))
    assert received[-1] == RejectionNotice(rejection())
    assert (await stage.runtime.status()).counters["in_flight"] == 0
    task.cancel()


async def test_a_finished_attempt_ends_the_request_only_if_it_is_the_latest(stage: Stage) -> None:
    """The finish of an attempt that was superseded does not drop the payload of its successor."""
    await stage.runtime.submit(job())
    await stage.runtime.resume(job(attempt=2))
    await stage.deliver(ev.RequestFinished("r1", 1, 3, FinishReason.STOP))
    assert (await stage.runtime.status()).counters["in_flight"] == 1
    await stage.deliver(ev.RequestFinished("r1", 2, 3, FinishReason.STOP))
    await stage.deliver(ev.RequestFinished("r1", 2, 3, FinishReason.STOP))
    assert (await stage.runtime.status()).counters["in_flight"] == 0


@pytest.mark.parametrize(
    ("command", "worker", "expected"),
    [
        (TRANSFER, "d0", lambda stage: ("pull_blocks", "t1", stage.p0, (1, 2))),
        (cmd.DropBlocks(Holder("p0", Tier.DEVICE), (3,)), "p0", lambda stage: ("drop_blocks", (3,))),
        (cmd.RequestSnapshot("p0", 1), "p0", lambda stage: ("snapshot",)),
        (cmd.RequestSnapshot("node-2", 1), "d0", lambda stage: ("snapshot",)),
    ],
)
async def test_commands_become_calls(
    stage: Stage, command: cmd.Command, worker: str, expected: Callable[[Stage], tuple[Any, ...]]
) -> None:
    """Each command reaches the worker that it concerns; a node's store answers through a worker of that node."""
    await stage.deliver(ev.Tick(), command)
    assert getattr(stage, worker).calls[-1] == expected(stage)


async def test_what_a_node_keeps_is_copied_from_a_worker_that_reads_it(stage: Stage) -> None:
    """Not from another one of the node; without such a worker the copy has failed."""
    reader = FakeWorker()
    stored = replace(spec("p1"), capacity_blocks={Tier.DEVICE: 64, Tier.HOST: 64})
    await stage.runtime.add_worker(stored, reader, "conductor")
    await stage.deliver(ev.Tick(), replace(TRANSFER, source=Holder("node-1", Tier.HOST)))
    assert stage.d0.called("pull_blocks") == [("t1", reader, (1, 2))]
    await stage.deliver(ev.Tick(), replace(TRANSFER, source=Holder("node-1", Tier.DISK)))
    assert stage.scheduler.seen(ev.TransferFailed) == [ev.TransferFailed("t1", "no worker at node-1")]


async def test_a_decode_worker_chosen_late_is_told_to_the_prefill_worker(stage: Stage) -> None:
    """StartDecode goes to where the request prefills."""
    await stage.runtime.submit(job())
    await stage.deliver(ev.Tick(), cmd.StartDecode("r1", 1, "d0"))
    assert stage.p0.called("choose_decode") == [("r1", 1, "d0", stage.d0)]


@pytest.mark.parametrize(("relay", "known"), [(None, False), ("d0", True), ("d7", False)])
async def test_a_prefill_worker_is_given_the_handle_of_whoever_reads_for_it(
    stage: Stage, relay: str | None, known: bool
) -> None:
    """The shared store itself is nobody; a relay that is gone by now leaves the prefill worker to itself."""
    reuse = ReusePlan(fetched_tokens=64, source=Holder(SHARED_STORE, Tier.SHARED), relay=relay)
    stage.scheduler.answer = lambda event: [cmd.StartPrefill(placement(reuse=reuse))]
    await stage.runtime.submit(job())
    await stage.settle()
    ((_, placed, _, source),) = stage.p0.called("prefill")
    assert (placed.reuse.relay, source) == (relay, stage.d0 if known else None)


async def test_reports_reach_the_scheduler_in_order(stage: Stage) -> None:
    """A worker's events arrive as reported, repeated ones included: the stamps are the scheduler's business."""
    stored = [ev.BlocksStored(Stamp("p0", 1, seq), Tier.DEVICE, None, (seq,)) for seq in (1, 2, 2)]
    await stage.runtime.report(stored)
    await stage.settle()
    assert stage.scheduler.seen(ev.BlocksStored) == stored


async def test_reported_load_is_in_the_status(stage: Stage) -> None:
    """What a worker says of itself is shown as it said it."""
    await stage.deliver(ev.LoadReported("d0", 1, WorkerLoad(decode_batch=3)))
    assert (await stage.runtime.status()).workers["d0"]["decode_batch"] == 3


async def test_a_draining_worker_does_not_count_as_ready(stage: Stage) -> None:
    """The scheduler is told, and the last worker of a role that drains makes the cluster unready."""
    await stage.runtime.drain_worker("p0")
    await stage.settle()
    assert stage.scheduler.seen(ev.WorkerDraining) == [ev.WorkerDraining("p0")]
    assert (await stage.runtime.status()).reason == "no prefill worker"


async def test_the_timer_ticks_at_the_deadline(stage: Stage) -> None:
    """Without any other event the scheduler hears Tick, not before its deadline."""
    stage.scheduler.deadline = deadline = asyncio.get_running_loop().time() + 0.02
    await stage.deliver(ev.LoadReported("d0", 1, WorkerLoad()))
    await asyncio.sleep(0.05)
    ticks = [now for event, now in zip(stage.scheduler.events, stage.scheduler.times, strict=True) if event == ev.Tick()]
    assert len(ticks) == 1
    assert ticks[0] >= deadline


async def test_an_overdue_deadline_does_not_starve_the_inbox(stage: Stage) -> None:
    """A scheduler that never moves its deadline on still gets its events."""

    class Stuck(ScriptedScheduler):
        def next_deadline(self) -> float | None:
            return 0.0

    runtime = ConductorRuntime(stuck := Stuck(place_arrivals))
    runtime.start()
    assert await asyncio.wait_for(runtime.submit(job()), 5) == placement()
    assert stuck.seen(ev.Tick) != []
    await runtime.stop()


async def test_decisions_come_from_the_scheduler(stage: Stage) -> None:
    """The record of a decision is the scheduler's own."""
    assert await stage.runtime.decision("r1") is None
    await stage.deliver(ev.RequestFinished("r1", 1, 3, FinishReason.STOP))
    assert await stage.runtime.decision("r1") == {"request_id": "r1"}


async def test_a_worker_with_blocks_of_another_size_is_refused_at_the_door() -> None:
    """The actor's scheduler never hears of it, and whoever introduces it is told what is wrong."""
    actor = ConductorActor(SchedulerConfig(block_tokens=64), logs=None)
    with pytest.raises(ValueError, match=r"profile\.block_tokens of worker .p0. is 4; it must be 64"):
        await actor.join(spec("p0"), FakeWorker())
    assert (await actor.status()).workers == {}
