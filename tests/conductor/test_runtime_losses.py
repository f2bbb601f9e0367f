"""The live driver when something breaks: calls, workers, output, the disk, the scheduler itself; and how requests go on."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from conductor.core import commands as cmd
from conductor.core import events as ev
from conductor.core.types import Holder, Role, Tier
from conductor.flight_log import FlightLogWriter
from conductor.notices import ResumeNotice, WorkerNotice
from conductor.runtime import SchedulerStoppedError
from tests.conductor.doubles import FakeWorker, LostWorkerError, job, placement, spec
from tests.conductor.stage import TRANSFER, Stage, notices_of

pytestmark = pytest.mark.usefixtures("quiet")


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


async def test_a_continuation_of_an_unknown_request_is_taken(stage: Stage) -> None:
    """A Conductor that was started again takes what its predecessor had placed."""
    assert await stage.runtime.resume(job(attempt=2)) == placement(attempt=2)
    assert [event.request.attempt for event in stage.scheduler.seen(ev.RequestResumed)] == [2]


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


async def test_a_second_consumer_takes_the_channel_over(stage: Stage) -> None:
    """Notices that nobody took reach the consumer who comes next, and the first one ends."""
    await stage.runtime.submit(job())
    await stage.deliver(ev.Tick(), cmd.ResumeRequest("r1", 1))
    received, first = await notices_of(stage)
    assert received[-1] == ResumeNotice("r1", 1)
    _, second = await notices_of(stage)
    assert first.done()
    second.cancel()


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
