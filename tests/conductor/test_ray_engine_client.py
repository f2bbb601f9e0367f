"""The engine client: tokens from several workers become one stream, and a lost worker goes unnoticed by the reader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from unittest.mock import Mock

import pytest

from conductor.core.events import RequestFailed, RequestFinished
from conductor.core.messages import GenerationJob, TokenOutput
from conductor.core.types import Decision, FinishReason
from conductor.engine_client import ClusterStatus
from conductor.notices import Notice, RejectionNotice, ResumeNotice, WorkerNotice
from conductor.ray_engine_client import RayEngineClient
from tests.conductor.doubles import LostWorkerError, job, placement, rejection

pytestmark = pytest.mark.usefixtures("quiet")


async def value(of: Any) -> Any:
    return of


class Feed:
    """A remote stream: `remote(channel)` iterates over awaitables of what is put; an exception put is raised."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self.channels: list[str] = []

    def put(self, *items: Any) -> None:
        for item in items:
            self._queue.put_nowait(item)

    async def remote(self, channel: str) -> AsyncIterator[Awaitable[Any]]:
        self.channels.append(channel)
        while True:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            yield value([item])


class FakeHandle:
    def __init__(self) -> None:
        self.outputs = Feed()


class Call:
    def __init__(self, note: list[tuple[Any, ...]], name: str, answer: Callable[..., Any]) -> None:
        self._note, self._name, self._answer = note, name, answer

    async def remote(self, *args: Any) -> Any:
        self._note.append((self._name, *args))
        return self._answer(*args)


class FakeConductor:
    """Places everything, unless told otherwise."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.notices = Feed()
        self.decide: Callable[[GenerationJob], Decision] = lambda job: placement(job.request.id, attempt=job.request.attempt)
        self.submit = Call(self.calls, "submit", lambda job: self.decide(job))
        self.resume = Call(self.calls, "resume", lambda job: self.decide(job))
        self.cancel = Call(self.calls, "cancel", lambda request_id: None)
        self.report = Call(self.calls, "report", lambda events: None)
        self.report_lost_output = Call(self.calls, "report_lost_output", lambda channel, failed: None)
        self.decision = Call(self.calls, "decision", lambda request_id: {"id": request_id})
        self.status = Call(self.calls, "status", lambda: ClusterStatus(True, "serving", "tiny"))

    def tell(self, notice: Notice) -> None:
        self.notices.put(notice)

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


class Stage:
    def __init__(self) -> None:
        self.conductor = FakeConductor()
        self.client = RayEngineClient(self.conductor, lambda tokens, tenant: (len(tokens),), "gateway-1")
        self.p0, self.d0 = FakeHandle(), FakeHandle()

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)

    async def open(self) -> None:
        await self.client.start()
        self.conductor.tell(WorkerNotice("p0", 1, self.p0))
        self.conductor.tell(WorkerNotice("d0", 1, self.d0))
        await self.settle()

    async def read(self, request_id: str = "r1") -> list[TokenOutput]:
        return [output async for output in self.client.outputs(request_id)]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    opened = Stage()
    await opened.open()
    yield opened
    await opened.client.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def output(index: int, *, attempt: int = 1, worker: str = "d0", finish: FinishReason | None = None) -> TokenOutput:
    return TokenOutput("r1", attempt, index, 100 + index, worker, finish)


async def test_outputs_of_two_workers_are_one_stream(stage: Stage) -> None:
    """The decode worker's tokens wait for the prefill worker's first one."""
    assert await stage.client.submit(job()) == placement()
    last = output(2, finish=FinishReason.LENGTH)
    stage.d0.outputs.put(output(1), last)
    await stage.settle()
    stage.p0.outputs.put(output(0, worker="p0"))
    assert await stage.read() == [output(0, worker="p0"), output(1), last]
    assert stage.p0.outputs.channels == ["gateway-1"]


async def test_tokens_that_come_before_the_decision_are_kept(stage: Stage) -> None:
    """A fast worker may be ahead of the Conductor's answer."""
    stage.conductor.decide = lambda job: stage.p0.outputs.put(output(0, finish=FinishReason.STOP)) or placement()  # type: ignore[func-returns-value]
    await stage.client.submit(job())
    assert [each.index for each in await stage.read()] == [0]


async def test_a_rejection_is_final(stage: Stage) -> None:
    """Nothing is kept of a refused request."""
    stage.conductor.decide = lambda job: rejection()
    assert await stage.client.submit(job()) == rejection()
    with pytest.raises(KeyError, match="'r1' is not in flight"):
        await stage.read()


async def test_a_lost_worker_is_one_uninterrupted_stream(stage: Stage) -> None:
    """The continuation goes on at the next index; debris of the first attempt, its cancellation included, is not seen."""
    await stage.client.submit(job(tokens=4))
    stage.p0.outputs.put(output(0, worker="p0"))
    stage.d0.outputs.put(output(1), TokenOutput("r1", 1, 2, None, "d0", FinishReason.CANCELLED))
    await stage.settle()
    stage.conductor.tell(ResumeNotice("r1", 1))
    stage.conductor.tell(ResumeNotice("r1", 1))
    await stage.settle()
    ((resumed,),) = stage.conductor.called("resume")
    assert (resumed.request.attempt, resumed.request.emitted_tokens, resumed.request.prompt_tokens) == (2, 2, 6)
    assert resumed.request.block_hashes == (24,)
    stage.p0.outputs.put(output(1), output(2, attempt=2, worker="p0", finish=FinishReason.STOP))
    assert [(each.attempt, each.index) for each in await stage.read()] == [(1, 0), (1, 1), (2, 2)]


async def test_exhausted_retries_end_the_stream_with_the_reason(stage: Stage) -> None:
    """A continuation that is refused fails the request, with the Conductor's words."""
    await stage.client.submit(job())
    stage.conductor.decide = lambda job: rejection()
    stage.conductor.tell(ResumeNotice("r1", 1))
    (last,) = await stage.read()
    assert (last.finish_reason, last.token_id, last.message) == (FinishReason.FAILED, None, "no worker")


async def test_a_late_rejection_ends_the_stream(stage: Stage) -> None:
    """What was placed and is refused afterwards does not hang."""
    await stage.client.submit(job())
    stage.conductor.tell(RejectionNotice(rejection()))
    (last,) = await stage.read()
    assert (last.finish_reason, last.message) == (FinishReason.FAILED, "no worker")


async def test_an_interrupted_request_with_nothing_left_to_generate_ends(stage: Stage) -> None:
    """All tokens came, only the end was lost."""
    await stage.client.submit(job(max_tokens=1))
    stage.p0.outputs.put(output(0, worker="p0"))
    await stage.settle()
    stage.conductor.tell(ResumeNotice("r1", 1))
    assert [(each.token_id, each.finish_reason) for each in await stage.read()] == [(100, None), (None, FinishReason.LENGTH)]
    assert stage.conductor.called("resume") == []
    assert stage.conductor.called("report") == [([RequestFinished("r1", 1, 1, FinishReason.LENGTH)],)]


@pytest.mark.parametrize("read_before", [False, True])
async def test_a_finished_request_whose_worker_took_word_of_it_along_is_over(stage: Stage, read_before: bool) -> None:
    """The Conductor takes it for interrupted; it must not wait for a continuation."""
    await stage.client.submit(job())
    stage.p0.outputs.put(output(0, worker="p0"))
    stage.d0.outputs.put(output(1, finish=FinishReason.STOP))
    await stage.settle()
    if read_before:
        assert len(await stage.read()) == 2
    stage.conductor.tell(ResumeNotice("r1", 1))
    await stage.settle()
    assert stage.conductor.called("report") == [([RequestFinished("r1", 1, 2, FinishReason.STOP)],)]


async def test_a_request_that_nobody_reads_is_not_continued(stage: Stage) -> None:
    """Its client has left."""
    stage.conductor.tell(ResumeNotice("r1", 1))
    await stage.settle()
    assert stage.conductor.called("cancel") == [("r1",)]


async def test_a_request_that_cannot_be_placed_again_is_over(stage: Stage) -> None:
    """Its reader is told, and the Conductor too."""
    await stage.client.submit(job())
    stage.conductor.decide = Mock(side_effect=RuntimeError("no"))
    stage.conductor.tell(ResumeNotice("r1", 1))
    (last,) = await stage.read()
    assert last.finish_reason is FinishReason.FAILED
    assert last.message == "the request could not be placed again: RuntimeError: no"
    await stage.settle()
    assert stage.conductor.called("cancel") == [("r1",)]


async def test_a_failed_output_is_reported_and_not_passed_on(stage: Stage) -> None:
    """Whether the request goes on elsewhere is the Conductor's decision."""
    await stage.client.submit(job())
    stage.p0.outputs.put(TokenOutput("r1", 1, 0, None, "p0", FinishReason.FAILED, message="out of blocks"))
    await stage.settle()
    failed = RequestFailed("r1", 1, "p0", "out of blocks")
    assert stage.conductor.called("report_lost_output") == [("gateway-1", failed)]


async def test_output_lost_with_its_worker_is_reported(stage: Stage) -> None:
    """The stream of a dead worker ended before the request did."""
    await stage.client.submit(job())
    stage.conductor.tell(WorkerNotice("p0", 1, None))
    stage.p0.outputs.put(LostWorkerError())
    await asyncio.sleep(0.3)
    failed = RequestFailed("r1", 1, "p0", "output was lost with its worker")
    assert stage.conductor.called("report_lost_output") == [("gateway-1", failed)]


async def test_an_interrupted_connection_to_a_living_worker_is_made_again(stage: Stage) -> None:
    """The consumer returns to a worker that the Conductor has not given up."""
    await stage.client.submit(job())
    stage.d0.outputs.put(ConnectionError())
    await asyncio.sleep(0.3)
    stage.p0.outputs.put(output(0, worker="p0"))
    stage.d0.outputs.put(output(1, finish=FinishReason.STOP))
    assert [each.index for each in await stage.read()] == [0, 1]


async def test_a_conductor_that_comes_back_interrupts_nothing(stage: Stage) -> None:
    """It counts the lives of workers anew; they are still the same, and their outputs go on."""
    await stage.client.submit(job())
    stage.conductor.tell(WorkerNotice("p0", 7, stage.p0))
    stage.conductor.tell(WorkerNotice("d0", 8, stage.d0))
    await stage.settle()
    stage.d0.outputs.put(LostWorkerError("the connection broke"))
    await asyncio.sleep(0.3)
    stage.p0.outputs.put(output(0, worker="p0"))
    stage.d0.outputs.put(output(1, finish=FinishReason.LENGTH))
    assert [each.index for each in await stage.read()] == [0, 1]
    assert stage.p0.outputs.channels == ["gateway-1"]
    assert stage.conductor.called("report_lost_output") == []


async def test_notices_are_followed_again_after_the_conductor_was_away(stage: Stage) -> None:
    """A restarted Conductor names its workers again; known lives are not consumed twice."""
    stage.conductor.notices.put(ConnectionError())
    stage.conductor.tell(WorkerNotice("p0", 1, stage.p0))
    fresh = FakeHandle()
    stage.conductor.tell(WorkerNotice("d0", 2, fresh))
    await asyncio.sleep(0.3)
    assert (len(stage.p0.outputs.channels), len(fresh.outputs.channels)) == (1, 1)


async def test_cancel_reaches_the_conductor_once_and_ends_the_stream(stage: Stage) -> None:
    """A second cancel, and one of an unknown request, is nothing."""
    await stage.client.submit(job())
    reading = asyncio.create_task(stage.read())
    await stage.settle()
    for request_id in ("r1", "r1", "unknown"):
        await stage.client.cancel(request_id)
    assert stage.conductor.called("cancel") == [("r1",)]
    assert [each.finish_reason for each in await reading] == [FinishReason.CANCELLED]


async def test_a_submission_that_is_given_up_is_cancelled(stage: Stage) -> None:
    """Whether the Conductor cannot answer or the client leaves: nothing stays behind."""

    def broken(job: GenerationJob) -> Decision:
        raise ConnectionError("gone")

    stage.conductor.decide = broken
    with pytest.raises(ConnectionError):
        await stage.client.submit(job())
    await stage.settle()
    assert stage.conductor.called("cancel") == [("r1",)]


@pytest.mark.parametrize("how", ["a submission that failed", "a client that left", "an unknown continuation"])
async def test_a_conductor_that_is_down_costs_a_cancellation_one_line(
    stage: Stage, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Which request it was and that nobody answered; no traceback, and the reader's stream ends as always."""

    caplog.set_level(logging.WARNING, "conductor")

    def gone(*args: Any) -> Any:
        raise ConnectionError("no such actor")

    stage.conductor.cancel = Call(stage.conductor.calls, "cancel", gone)
    if how == "a submission that failed":
        stage.conductor.submit = Call(stage.conductor.calls, "submit", gone)
        with pytest.raises(ConnectionError):
            await stage.client.submit(job())
    elif how == "a client that left":
        await stage.client.submit(job())
        await stage.client.cancel("r1")
    else:
        stage.conductor.tell(ResumeNotice("r1", 1))
    await stage.settle()
    assert stage.conductor.called("cancel") == [("r1",)]
    (record,) = caplog.records
    message = "request r1 was not cancelled at the Conductor, which does not answer: ConnectionError"
    assert (record.levelname, record.getMessage(), record.exc_info) == ("WARNING", message, None)


async def test_a_failure_is_reported_until_the_conductor_has_heard_it(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says that it is down and one that it is back, whatever was tried meanwhile, and none is a traceback. What has
    ended is not reported any more."""
    monkeypatch.setattr("conductor.ray_engine_client.RECONNECT_DELAY_S", 0.001)
    caplog.set_level(logging.WARNING, "conductor")
    conductor, down = stage.conductor, True

    def gone(*args: Any) -> None:
        if down:
            raise ConnectionError("no such actor")

    conductor.report_lost_output = Call(conductor.calls, "report_lost_output", gone)
    conductor.report = Call(conductor.calls, "report", gone)
    for request_id in ("r1", "r2"):
        await stage.client.submit(job(request_id))
        stage.d0.outputs.put(TokenOutput(request_id, 1, 1, None, "d0", FinishReason.FAILED, message="no room"))
    await until(lambda: len(conductor.called("report_lost_output")) > 8)
    await stage.client.cancel("r2")
    down = False
    before = len(conductor.called("report_lost_output"))
    await until(lambda: len(conductor.called("report_lost_output")) > before)
    await asyncio.sleep(0.02)
    told = conductor.called("report_lost_output")[before:]
    assert told == [("gateway-1", RequestFailed("r1", 1, "d0", "no room"))]
    assert [record.exc_info for record in caplog.records] == [None, None]
    first, last = (record.getMessage() for record in caplog.records)
    assert first == "the failure of request r1 was not reported at the Conductor, which does not answer: ConnectionError"
    assert last.startswith("the Conductor answers again; meanwhile ")


async def test_an_ending_that_a_conductor_does_not_hear_is_one_line(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever comes in its place has never heard of the request. Notices that break off while it is down are counted."""
    caplog.set_level(logging.WARNING, "conductor")

    def gone(*args: Any) -> None:
        raise ConnectionError("no such actor")

    await stage.client.submit(job())
    stage.p0.outputs.put(output(0, worker="p0", finish=FinishReason.STOP))
    await stage.read()
    stage.conductor.report = Call(stage.conductor.calls, "report", gone)
    stage.conductor.tell(ResumeNotice("r1", 1))
    await stage.settle()
    stage.conductor.notices.put(ConnectionError("no such actor"))
    await stage.settle()
    (record,) = caplog.records
    message = "the end of request r1 was not reported at the Conductor, which does not answer: ConnectionError"
    assert (record.levelname, record.getMessage(), record.exc_info) == ("WARNING", message, None)


async def test_status_says_when_the_conductor_does_not_answer(stage: Stage) -> None:
    """No exception reaches `/ready`."""
    assert (await stage.client.status()).ready

    class Silent:
        async def remote(self) -> None:
            raise ConnectionError

    stage.conductor.status = Silent()  # type: ignore[assignment]
    status = await stage.client.status()
    assert (status.ready, status.reason) == (False, "the Conductor does not answer (ConnectionError)")


async def test_the_decision_record_is_passed_through(stage: Stage) -> None:
    """The gateway shows what the Conductor knows."""
    assert await stage.client.decision("r7") == {"id": "r7"}
