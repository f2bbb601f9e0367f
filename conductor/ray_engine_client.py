"""The gateway's way to a cluster of actors: submits to the Conductor, and gathers the tokens that workers send it directly.

One consumer per worker life reads that worker's output stream for this client's channel and hands each output to its
request. A `ResumeNotice` from the Conductor turns into the continuation: the prompt with everything passed on so far,
hashed again, as the next attempt. Several gateways use one Conductor at once, each with a channel of its own.

A worker's CANCELLED or FAILED output ends nothing by itself, for it may be the debris of an attempt that is about to be placed
again; the Conductor's notice decides. Handles are Ray actor handles in production and doubles in tests; only
`handle.method.remote(...)` is used, and what it returns is awaited or iterated.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from conductor.connection import will_answer_again
from conductor.core.events import RequestFailed, RequestFinished
from conductor.core.messages import GenerationJob, TokenOutput
from conductor.core.types import BlockHash, Decision, FinishReason, Placement, Rejection, RequestId, WorkerId
from conductor.engine_client import ClusterStatus, HashPrompt
from conductor.mailbox import Mailbox
from conductor.notices import Notice, RejectionNotice, ResumeNotice, WorkerNotice
from conductor.output_stream import OutputStream

logger = logging.getLogger(__name__)

RECONNECT_DELAY_S = 0.2
STATUS_TIMEOUT_S = 5.0
ENDED_REMEMBERED = 4096  # for as long as the Conductor may take to notice that a worker is gone


class _Request:
    """A request in flight: its stream, and the mailbox that `outputs` reads."""

    def __init__(self, job: GenerationJob) -> None:
        self.stream = OutputStream(job)
        self.mailbox: Mailbox[TokenOutput] = Mailbox()

    def deliver(self, output: TokenOutput) -> None:
        for ready in self.stream.push(output):
            self.mailbox.put(ready)

    def end(self, reason: FinishReason, message: str | None = None) -> None:
        if not self.stream.finished:
            self.mailbox.put(self.stream.end(reason, message))


class _Outage:
    """Says once that the Conductor does not answer, and once that it does again, however many calls fail in between."""

    def __init__(self) -> None:
        self._failures = 0

    def failed(self, what: str, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            logger.warning("%s at the Conductor, which does not answer: %s", what, type(error).__name__)

    def over(self) -> None:
        if self._failures > 1:
            logger.warning("the Conductor answers again; meanwhile %d calls to it have failed", self._failures)
        self._failures = 0


@dataclass(slots=True)
class _Life:
    """One life of a worker. A Conductor that was started again gives it another epoch, but it is the same life."""

    epoch: int
    handle: Any


class RayEngineClient:
    """An `EngineClient` over the Conductor's actor handle. `start` on the event loop that uses it; `close` at the end."""

    def __init__(self, conductor: Any, hash_prompt: HashPrompt, channel: str | None = None) -> None:
        self._conductor = conductor
        self._hash_prompt = hash_prompt
        self._channel = channel or f"gateway-{uuid.uuid4().hex}"
        self._requests: dict[RequestId, _Request] = {}
        self._ended: deque[RequestFinished] = deque(maxlen=ENDED_REMEMBERED)
        self._workers: dict[WorkerId, _Life] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._outage = _Outage()

    @property
    def channel(self) -> str:
        return self._channel

    async def start(self) -> None:
        """Listen to the Conductor and to every worker that it names."""
        self._spawn(self._listen())

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- the gateway's side -------------------------------------------------------------------------------------------

    async def submit(self, job: GenerationJob) -> Decision:
        request_id = job.request.id
        request = self._requests[request_id] = _Request(job)
        try:
            decision: Decision = await self._conductor.submit.remote(job)
        except BaseException:
            del self._requests[request_id]
            self._spawn(self._cancel_at_conductor(request_id))
            raise
        if isinstance(decision, Rejection):
            del self._requests[request_id]
        else:
            request.stream.placed(decision)
        return decision

    async def outputs(self, request_id: RequestId) -> AsyncIterator[TokenOutput]:
        request = self._requests.get(request_id)
        if request is None:
            raise KeyError(f"request id {request_id!r} is not in flight; submit it first")
        async for batch in request.mailbox.batches():
            for output in batch:
                if output.finish_reason is not None:
                    self._forget(request)
                yield output
                if output.finish_reason is not None:
                    return

    def _forget(self, request: _Request) -> None:
        self._requests.pop(request.stream.job.request.id, None)
        ending = request.stream.ending()
        if ending is not None:
            self._ended.append(ending)

    async def cancel(self, request_id: RequestId) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        self._forget(request)
        if not request.stream.finished:
            request.end(FinishReason.CANCELLED)
            await self._cancel_at_conductor(request_id)

    async def decision(self, request_id: RequestId) -> Mapping[str, Any] | None:
        record: Mapping[str, Any] | None = await self._conductor.decision.remote(request_id)
        return record

    async def overview(self) -> Mapping[str, Any]:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            picture: Mapping[str, Any] = await self._conductor.overview.remote()
        return picture

    async def status(self) -> ClusterStatus:
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                status: ClusterStatus = await self._conductor.status.remote()
        except Exception as error:
            return ClusterStatus(False, f"the Conductor does not answer ({type(error).__name__})", model="")
        return status

    async def cache_command(self, action: str, name: BlockHash | None) -> Mapping[str, Any]:
        answers: Mapping[str, Any] = await self._conductor.cache_command.remote(action, name)
        return answers

    # --- the cluster's side -------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Follow the Conductor's notices, again after every interruption."""
        while True:
            try:
                async for pending in self._conductor.notices.remote(self._channel):
                    notices = await pending
                    self._outage.over()
                    for notice in notices:
                        self._take(notice)
            except Exception as error:
                self._outage.failed("notices were interrupted", error)
            await asyncio.sleep(RECONNECT_DELAY_S)

    def _take(self, notice: Notice) -> None:
        if isinstance(notice, WorkerNotice):
            self._take_worker(notice)
        elif isinstance(notice, ResumeNotice):
            self._spawn(self._answer(notice))
        else:
            self._take_rejection(notice)

    def _take_worker(self, notice: WorkerNotice) -> None:
        known = self._workers.get(notice.worker_id)
        if notice.handle is None:
            if known is not None and known.epoch == notice.epoch:
                del self._workers[notice.worker_id]
        elif known is not None and known.handle == notice.handle:
            known.epoch = notice.epoch
        else:
            life = self._workers[notice.worker_id] = _Life(notice.epoch, notice.handle)
            self._spawn(self._consume(notice.worker_id, life))

    def _take_rejection(self, notice: RejectionNotice) -> None:
        request = self._requests.get(notice.rejection.request_id)
        if request is not None:
            request.end(FinishReason.FAILED, notice.rejection.message)

    async def _consume(self, worker_id: WorkerId, life: _Life) -> None:
        """Read one worker's outputs for as long as this life of it is known."""
        while True:
            try:
                async for pending in life.handle.outputs.remote(self._channel):
                    for output in await pending:
                        self._deliver(output)
            except Exception as error:
                logger.info("outputs of worker %s were interrupted: %s", worker_id, type(error).__name__)
            await asyncio.sleep(RECONNECT_DELAY_S)
            if self._workers.get(worker_id) is not life:
                break
        await self._report_missing(worker_id)

    def _deliver(self, output: TokenOutput) -> None:
        request = self._requests.get(output.request_id)
        if request is None or output.attempt != request.stream.attempt:
            return
        if output.finish_reason is FinishReason.FAILED:
            self._spawn(self._report_failed(request, output.worker, output.message or "the worker gave up"))
        elif output.finish_reason is not FinishReason.CANCELLED:
            request.deliver(output)

    async def _report_missing(self, worker_id: WorkerId) -> None:
        """Everything that the worker had sent has come; what still depends on it will not come."""
        for request in list(self._requests.values()):
            if request.stream.depends_on(worker_id):
                await self._report_failed(request, worker_id, "output was lost with its worker")

    async def _report_failed(self, request: _Request, worker_id: WorkerId, message: str) -> None:
        """Until the Conductor has heard it: one that is started again meanwhile hears it from nobody else."""
        stream, attempt = request.stream, request.stream.attempt
        failed = RequestFailed(stream.job.request.id, attempt, worker_id, message)
        what = f"the failure of request {failed.request_id} was not reported"
        while self._requests.get(failed.request_id) is request and stream.attempt == attempt and not stream.finished:
            if await self._told(what, self._conductor.report_lost_output, self._channel, failed):
                return
            await asyncio.sleep(RECONNECT_DELAY_S)

    async def _answer(self, notice: ResumeNotice) -> None:
        """Go on with an interrupted request, unless nothing is left to go on with."""
        request = self._requests.get(notice.request_id)
        if request is not None and request.stream.exhausted():
            request.end(FinishReason.LENGTH)
        if request is not None and not request.stream.finished:
            if request.stream.attempt == notice.attempt:
                await self._resume(request)
            return
        ended = self._ended if request is None else [request.stream.ending()]
        for ending in ended:
            if ending is not None and ending.request_id == notice.request_id:
                await self._told(f"the end of request {notice.request_id} was not reported", self._conductor.report, [ending])
                return
        await self._cancel_at_conductor(notice.request_id)

    async def _resume(self, request: _Request) -> None:
        """A Conductor that is lost meanwhile is asked again for the attempt after, since the one asked for may run already."""
        stream = request.stream
        job = stream.continue_as_next_attempt(self._hash_prompt)
        try:
            decision: Decision = await self._conductor.resume.remote(job)
        except Exception as error:
            if not will_answer_again(error):
                request.end(FinishReason.FAILED, f"the request could not be placed again: {type(error).__name__}: {error}")
                await self._cancel_at_conductor(job.request.id)
                return
            self._outage.failed(f"request {job.request.id} was not placed again", error)
            await asyncio.sleep(RECONNECT_DELAY_S)
            if self._requests.get(job.request.id) is request and stream.job is job and not stream.finished:
                await self._resume(request)
            return
        if isinstance(decision, Placement):
            stream.placed(decision)
        else:
            request.end(FinishReason.FAILED, decision.message)

    async def _cancel_at_conductor(self, request_id: RequestId) -> None:
        """One that does not answer is gone, and whatever comes in its place has never heard of the request."""
        await self._told(f"request {request_id} was not cancelled", self._conductor.cancel, request_id)

    async def _told(self, what: str, method: Any, *args: Any) -> bool:
        """Whether the Conductor has taken a call; `what` is the case where it has not."""
        try:
            await method.remote(*args)
        except Exception as error:
            self._outage.failed(what, error)
            return False
        self._outage.over()
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _logged(work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            logger.exception("a background task of the engine client failed")
