"""The live driver: events in one at a time, commands out as worker calls, and every failure back as an event."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from conductor.cluster import ConductorActor
from conductor.core import commands as cmd
from conductor.core import events as ev
from conductor.core.config import SchedulerConfig
from conductor.core.types import FinishReason, Holder, Role, Stamp, Tier, TransferReason, WorkerLoad
from conductor.flight_log import FlightLogWriter
from conductor.notices import RejectionNotice, ResumeNotice, WorkerNotice
from conductor.runtime import ConductorRuntime, DuplicateRequestError, Ports, RequestCancelledError, SchedulerStoppedError
from tests.conductor.doubles import FakeWorker, LostWorkerError, ScriptedScheduler, job, placement, rejection, spec


def place_arrivals(event: ev.Event) -> list[cmd.Command]:
    """Every request goes to p0, every continuation too."""
    if isinstance(event, ev.RequestArrived | ev.RequestResumed):
        return [cmd.StartPrefill(placement(event.request.id, attempt=event.request.attempt))]
    return []


class Stage:
    """A running runtime with a scripted scheduler and two fake workers."""

    def __init__(self, **options: Any) -> None:
        self.scheduler = ScriptedScheduler(place_arrivals)
        self.fatal: list[Exception] = []
        ports = Ports(is_worker_loss=lambda error: isinstance(error, LostWorkerError), on_fatal=self.fatal.append)
        self.runtime = ConductorRuntime(self.scheduler, ports=ports, **options)
        self.p0, self.d0 = FakeWorker(), FakeWorker()

    async def open(self) -> None:
        self.runtime.start()
        await self.runtime.add_worker(spec("p0"), self.p0, "conductor")
        await self.runtime.add_worker(spec("d0", Role.DECODE, "node-2"), self.d0, "conductor")
        await self.settle()

    async def settle(self) -> None:
        """Let everything that can run, run."""
        for _ in range(30):
            await asyncio.sleep(0)

    async def deliver(self, event: ev.Event, *commands: cmd.Command) -> None:
        """Report `event` and have the scheduler answer it with `commands`."""
        self.scheduler.answer = lambda seen: list(commands) if seen is event else place_arrivals(seen)
        await self.runtime.report([event])
        await self.settle()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("conductor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(before)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    opened = Stage()
    await opened.open()
    yield opened
    await opened.runtime.stop()


async def notices_of(stage: Stage, channel: str = "gateway-1") -> tuple[list[Any], asyncio.Task[None]]:
    """Everything that the channel receives, as it arrives."""
    received: list[Any] = []

    async def collect() -> None:
        async for batch in stage.runtime.notices(channel):
            received.extend(batch)

    task = asyncio.create_task(collect())
    await stage.settle()
    return received, task


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


async def test_a_failed_prefill_call_fails_the_request(stage: Stage) -> None:
    """The worker lives but cannot: the scheduler hears RequestFailed with the message."""
    stage.p0.errors["prefill"] = ValueError("out of blocks")
    await stage.runtime.submit(job())
    await stage.settle()
    assert stage.scheduler.seen(ev.RequestFailed) == [ev.RequestFailed("r1", 1, "p0", "ValueError: out of blocks")]


async def test_a_call_to_a_dead_worker_is_the_loss_of_the_worker(stage: Stage) -> None:
    """The scheduler hears WorkerLost, and the worker gets no further calls."""
    epoch = stage.scheduler.seen(ev.WorkerJoined)[0].epoch
    stage.p0.errors["prefill"] = LostWorkerError()
    await stage.runtime.submit(job())
    await stage.settle()
    assert stage.scheduler.seen(ev.WorkerLost) == [ev.WorkerLost("p0", epoch)]
    await stage.runtime.submit(job("r2"))
    await stage.settle()
    assert stage.scheduler.seen(ev.RequestFailed) == [ev.RequestFailed("r2", 1, "p0", "worker p0 is gone")]


async def test_a_worker_that_dies_idle_is_noticed(stage: Stage) -> None:
    """alive() ends, the worker is lost, the cluster is not ready, and front ends are told."""
    received, task = await notices_of(stage)
    stage.d0.died.set()
    await stage.settle()
    epoch = stage.scheduler.seen(ev.WorkerJoined)[1].epoch
    assert stage.scheduler.seen(ev.WorkerLost) == [ev.WorkerLost("d0", epoch)]
    status = await stage.runtime.status()
    assert (status.ready, status.reason) == (False, "no decode worker")
    assert received[-1] == WorkerNotice("d0", epoch, None)
    task.cancel()


async def test_a_worker_comes_back_with_a_higher_epoch(stage: Stage) -> None:
    """The late news of an earlier life does not take the next one away."""
    first = stage.scheduler.seen(ev.WorkerJoined)[1].epoch
    stage.d0.died.set()
    await stage.settle()
    second = await stage.runtime.add_worker(spec("d0", Role.DECODE), FakeWorker(), "conductor")
    await stage.deliver(ev.WorkerLost("d0", first))
    assert second > first
    assert (await stage.runtime.status()).ready


async def test_an_interrupted_request_is_resumed_by_its_front_end(stage: Stage) -> None:
    """ResumeRequest becomes a notice on the request's channel; the continuation is placed as the next attempt."""
    received, task = await notices_of(stage)
    await stage.runtime.submit(job())
    await stage.deliver(ev.Tick(), cmd.ResumeRequest("r1", 1))
    assert received[-1] == ResumeNotice("r1", 1)
    assert await stage.runtime.resume(job(attempt=2, tokens=10)) == placement(attempt=2)
    task.cancel()


async def test_a_continuation_of_an_unknown_request_is_an_arrival(stage: Stage) -> None:
    """A Conductor that was started again takes what its predecessor had placed."""
    assert await stage.runtime.resume(job(attempt=2)) == placement(attempt=2)
    assert [event.request.attempt for event in stage.scheduler.seen(ev.RequestArrived)] == [2]


async def test_lost_output_of_a_known_request_fails_its_attempt(stage: Stage) -> None:
    """The scheduler decides how it goes on."""
    failed = ev.RequestFailed("r1", 1, "d0", "output was lost")
    await stage.runtime.submit(job())
    await stage.runtime.report_lost_output("gateway-1", failed)
    await stage.settle()
    assert stage.scheduler.seen(ev.RequestFailed) == [failed]


async def test_lost_output_of_an_ended_request_is_asked_for_again(stage: Stage) -> None:
    """The worker reported the end, and its last tokens never came: the front end may submit the continuation."""
    received, task = await notices_of(stage)
    await stage.runtime.report_lost_output("gateway-1", ev.RequestFailed("r1", 1, "d0", "output was lost"))
    await stage.settle()
    assert received[-1] == ResumeNotice("r1", 1)
    task.cancel()


async def test_stop_fails_those_who_wait_and_ends_the_notices(stage: Stage) -> None:
    """Nobody hangs on a runtime that is gone."""
    stage.scheduler.answer = lambda event: []
    _, task = await notices_of(stage)
    waiting = asyncio.create_task(stage.runtime.submit(job()))
    await stage.settle()
    await stage.runtime.stop()
    with pytest.raises(SchedulerStoppedError, match="shutting down"):
        await waiting
    await asyncio.wait_for(task, 5)


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


async def test_a_second_consumer_takes_the_channel_over(stage: Stage) -> None:
    """Notices that nobody took reach the consumer who comes next, and the first one ends."""
    await stage.runtime.submit(job())
    await stage.deliver(ev.Tick(), cmd.ResumeRequest("r1", 1))
    received, first = await notices_of(stage)
    assert received[-1] == ResumeNotice("r1", 1)
    _, second = await notices_of(stage)
    assert first.done()
    second.cancel()


TRANSFER = cmd.TransferBlocks("t1", Holder("p0", Tier.DEVICE), Holder("d0", Tier.DEVICE), (1, 2), TransferReason.REPLICATE)


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


async def test_a_decode_worker_chosen_late_is_told_to_the_prefill_worker(stage: Stage) -> None:
    """StartDecode goes to where the request prefills."""
    await stage.runtime.submit(job())
    await stage.deliver(ev.Tick(), cmd.StartDecode("r1", 1, "d0"))
    assert stage.p0.called("choose_decode") == [("r1", 1, "d0", stage.d0)]


async def test_a_failed_transfer_comes_back_as_an_event(stage: Stage) -> None:
    """Whether the call fails or an end of the transfer is gone."""
    stage.d0.errors["pull_blocks"] = OSError("link down")
    await stage.deliver(ev.Tick(), TRANSFER)
    stage.p0.died.set()
    await stage.settle()
    await stage.deliver(ev.Tick(), TRANSFER)
    assert stage.scheduler.seen(ev.TransferFailed) == [
        ev.TransferFailed("t1", "OSError: link down"),
        ev.TransferFailed("t1", "no worker at p0"),
    ]


async def test_failed_advice_is_counted(stage: Stage) -> None:
    """A call that nothing depends on is not swallowed either."""
    stage.p0.errors["drop_blocks"] = ValueError("no")
    await stage.deliver(ev.Tick(), cmd.DropBlocks(Holder("p0", Tier.DEVICE), (3,)))
    assert (await stage.runtime.status()).counters["call_failures"] == 1


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


async def test_a_broken_scheduler_fails_everybody_who_waits(stage: Stage) -> None:
    """An invariant that breaks is loud: submissions fail, the status says why, and the driver's owner is called."""

    def broken(event: ev.Event) -> list[cmd.Command]:
        raise AssertionError("I9 does not hold")

    stage.scheduler.answer = broken
    with pytest.raises(SchedulerStoppedError, match="I9 does not hold"):
        await stage.runtime.submit(job())
    with pytest.raises(SchedulerStoppedError, match="I9 does not hold"):
        await stage.runtime.submit(job("r2"))
    assert "I9 does not hold" in (await stage.runtime.status()).reason
    assert [str(error) for error in stage.fatal] == ["I9 does not hold"]


async def test_decisions_come_from_the_scheduler(stage: Stage) -> None:
    """The record of a decision is the scheduler's own."""
    assert await stage.runtime.decision("r1") is None
    await stage.deliver(ev.RequestFinished("r1", 1, 3, FinishReason.STOP))
    assert await stage.runtime.decision("r1") == {"request_id": "r1"}


class FullDisk(FlightLogWriter):
    def append(self, *args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_full_disk_ends_the_flight_log_and_not_the_service(tmp_path: Any) -> None:
    """Requests go on; the fault is counted."""
    log = FullDisk(tmp_path / "a.flight.jsonl", placement(), segment_bytes=1000, max_segments=2)
    stage = Stage(flight_log=log)
    await stage.open()
    assert await stage.runtime.submit(job()) == placement()
    assert (await stage.runtime.status()).counters["flight_log_errors"] == 1
    await stage.runtime.stop()
    log.close()


async def test_a_worker_with_blocks_of_another_size_is_refused_at_the_door() -> None:
    """The actor's scheduler never hears of it, and whoever introduces it is told what is wrong."""
    actor = ConductorActor(SchedulerConfig(block_tokens=64), logs=None)
    with pytest.raises(ValueError, match=r"profile\.block_tokens of worker .p0. is 4; it must be 64"):
        await actor.join(spec("p0"), FakeWorker())
    assert (await actor.status()).workers == {}
