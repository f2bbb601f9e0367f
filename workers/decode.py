"""The decode worker: takes prompts with their KV, and runs all of them together, one token a step.

Hand-overs come in beside the computing (`incoming.py`). When blocks run out, the youngest sequence gives its own back and is
computed again, from whatever is still cached, as soon as blocks are free; until then no new hand-over is let in, so nobody
starves. What joins, grows and yields is planned in `batching.py`. Tokens go straight to the gateway. (Continuous batching:
Orca, OSDI'22; disaggregated decode: Mooncake FAST'25, section 3.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conductor.core.events import HandoverFinished, RequestFinished
from conductor.core.messages import GenerationJob, TokenOutput
from conductor.core.types import FinishReason, Placement, RequestId, WorkerId, WorkerLoad
from models.sampling import SampledToken
from workers.actor import WorkerActor, failure_text
from workers.assembly import Build, build_parts
from workers.batching import DecodePlan, Running, Waiting, chunk_length, plan_decode
from workers.block_pool import OutOfBlocks
from workers.config import WorkerConfig
from workers.incoming import HandoverRefused, Incoming, Receiver
from workers.jobs import HandoverPart, JobKey, finish_reason, job_key, last_output, prompt_of, refusal, token_output
from workers.sequence import KVSequence

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Active:
    """A request that decodes or waits to. A preempted one holds no blocks."""

    job: GenerationJob
    sequence: KVSequence
    cancelled: bool = False

    @property
    def key(self) -> JobKey:
        return job_key(self.job)

    @property
    def holds_blocks(self) -> bool:
        return bool(self.sequence.table)

    @property
    def caught_up(self) -> bool:
        """Everything but the token drawn last has its KV."""
        return self.sequence.computed == len(self.sequence.tokens) - 1


class DecodeWorker(WorkerActor):
    def __init__(self, config: WorkerConfig, build: Build = build_parts) -> None:
        super().__init__(config, build)
        self._incoming: dict[JobKey, Incoming] = {}
        self._running: dict[JobKey, _Active] = {}  # oldest first
        self._waiting: dict[JobKey, _Active] = {}  # in order of service
        self._receiver = Receiver(self.engine, self.transport, self._move, config.lease_s)
        self.preemptions = 0

    # --- calls --------------------------------------------------------------------------------------------------------

    async def receive_parts(self, job: GenerationJob, placement: Placement, parts: Sequence[HandoverPart]) -> int:
        """Take KV of a prompt while the rest of it is still being computed. Late, repeated and failed parts do no harm.

        Tells how many of the prompt's first blocks need not come, because they are cached here and pinned for it.
        """
        self._start()
        incoming = self._open(job, placement.prefill)
        if incoming is None:
            return 0
        await self._receiver.receive(incoming, parts)
        return 0 if incoming.sequence is None else incoming.sequence.named

    async def accept_handover(
        self, job: GenerationJob, placement: Placement, first: TokenOutput, parts: Sequence[HandoverPart]
    ) -> None:
        """Take all KV of a prompt and go on from its first token; returns when the KV is here. Raises `HandoverRefused`."""
        self._start()
        incoming = self._open(job, placement.prefill)
        if incoming is None:
            return
        if incoming.accepting is None:
            incoming.accepting = self._spawn(self._accept(incoming, first, parts))
            incoming.accepting.add_done_callback(_take_error)  # also when the caller is gone
        await asyncio.wait((incoming.accepting,))
        if incoming.accepting.cancelled():
            raise HandoverRefused("this worker is shutting down")
        error = incoming.accepting.exception()
        if error is not None:
            raise HandoverRefused(failure_text(error))

    async def cancel(self, request_id: RequestId, attempt: int) -> None:
        key = (request_id, attempt)
        self._end(key)
        incoming = self._incoming.get(key)
        if incoming is not None:
            await self._drop(incoming)  # its prefill worker tells the gateway
        active = self._running.get(key) or self._waiting.get(key)
        if active is not None:
            active.cancelled = True
            self._emit(active.job, last_output(active.job, self.id, active.sequence.output_tokens, FinishReason.CANCELLED))
            self._wake.set()

    async def stats(self) -> dict[str, Any]:
        numbers = await super().stats()
        counts = {"queued": len(self._waiting) + len(self._incoming), "running": len(self._running)}
        return numbers | counts | {"preemptions": self.preemptions}

    def _load(self) -> WorkerLoad:
        return WorkerLoad(
            queued_requests=len(self._waiting) + len(self._incoming),
            decode_batch=len(self._running),
            decode_context_tokens=sum(len(active.sequence.tokens) for active in self._running.values()),
            free_blocks=self.cache.available,
            transport_fallbacks=self.transport.fallbacks,
        )

    # --- hand-overs ---------------------------------------------------------------------------------------------------

    def _open(self, job: GenerationJob, source: WorkerId) -> Incoming | None:
        """The hand-over of this attempt; None when it has been taken already. Raises `HandoverRefused`."""
        key = job_key(job)
        if key in self._running or key in self._waiting or self._ended.get(key, False):
            return None
        if key in self._ended:
            raise HandoverRefused("the request was cancelled or given up here")
        lease_end_s = asyncio.get_running_loop().time() + self.config.lease_s
        incoming = self._incoming.get(key)
        if incoming is None:
            problem = refusal(job, self.engine)
            if problem is not None:
                raise HandoverRefused(problem)
            prompt = prompt_of(job, self._parts.root_of(job.request.cache_domain))
            incoming = Incoming(job, source, prompt, lease_end_s)
            incoming.reserving = self._spawn(self._receiver.reserve(incoming, self._may_let_in))
            self._incoming[key] = incoming
        incoming.deadline_s = lease_end_s
        return incoming

    def _may_let_in(self) -> bool:
        return all(active.holds_blocks for active in self._waiting.values())

    async def _accept(self, incoming: Incoming, first: TokenOutput, parts: Sequence[HandoverPart]) -> None:
        key = job_key(incoming.job)
        try:
            await self._receiver.receive(incoming, parts)
            sequence = incoming.sequence
            if incoming.dropped or sequence is None or first.token_id is None:
                raise HandoverRefused("the request was cancelled")
            self.engine.complete(sequence, first.token_id)
        except Exception:
            self._end(key)
            await self._drop(incoming)
            raise
        del self._incoming[key]
        self._waiting[key] = _Active(incoming.job, sequence)
        self._report(HandoverFinished(*key, incoming.nbytes, incoming.transfer_s))
        self._report_link(incoming.source)
        self._wake.set()

    async def _drop(self, incoming: Incoming) -> None:
        incoming.dropped = True  # at once: its acceptance may be the next to run
        self._incoming.pop(job_key(incoming.job), None)
        sequence = await asyncio.shield(self._spawn(self._receiver.settle(incoming)))
        if sequence is not None:
            self.engine.finish(sequence)
        self._reporter.touch()

    def _reap(self) -> None:
        super()._reap()
        now = asyncio.get_running_loop().time()
        for incoming in list(self._incoming.values()):
            if now >= incoming.deadline_s and incoming.accepting is None:
                logger.warning("the hand-over of request %s outlived its lease", incoming.job.request.id)
                self._end(job_key(incoming.job))
                self._spawn(self._drop(incoming))

    def _on_blocks_freed(self) -> None:
        super()._on_blocks_freed()
        self._receiver.blocks_freed()

    # --- decoding -----------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            self._forget_cancelled()
            plan = self._plan()
            self._preempt(plan)
            self._admit(plan)
            if not await self._advance():
                await self._wake.wait()

    def _plan(self) -> DecodePlan[JobKey]:
        running = [Running(key, a.sequence.computed, len(a.sequence.table)) for key, a in self._running.items()]
        waiting = [
            Waiting(key, 0 if a.holds_blocks else self.engine.blocks_for(len(a.sequence.tokens)))
            for key, a in self._waiting.items()
        ]
        return plan_decode(
            running,
            waiting,
            available_blocks=self.cache.available,
            block_tokens=self.cache.block_tokens,
            max_batch=self.config.max_batch,
        )

    def _preempt(self, plan: DecodePlan[JobKey]) -> None:
        """The youngest wait first in line, in their old order, without blocks."""
        preempted = {}
        for key in reversed(plan.preempt):
            active = self._running.pop(key)
            self.engine.finish(active.sequence)
            preempted[active.key] = active
            self.preemptions += 1
        if preempted:
            self._waiting = preempted | self._waiting

    def _admit(self, plan: DecodePlan[JobKey]) -> None:
        for key in plan.admit:
            active = self._waiting[key]
            if not active.holds_blocks:
                again = self.engine.begin_again(active.sequence)
                if isinstance(again, OutOfBlocks):
                    return
                active.sequence = again
                self._receiver.blocks_freed()  # nobody is preempted any more: hand-overs may come in
            del self._waiting[active.key]
            self._running[active.key] = active

    async def _advance(self) -> bool:
        """One chunk for a sequence that catches up, one step for all others; False when there is nothing to compute."""
        behind = next((active for active in self._running.values() if not active.caught_up), None)
        batch = [active for active in self._running.values() if active.caught_up]
        try:
            if behind is not None:
                await self._run(self._catch_up, behind.sequence)
            drawn = await self._run(self._step, [active.sequence for active in batch]) if batch else []
        except Exception as error:
            logger.exception("a decode step broke")
            self._fail_all(failure_text(error))
            return True
        for active, tokens in zip(batch, drawn, strict=True):
            self._deliver_all(active, tokens)
        self._reporter.touch()
        return behind is not None or any(drawn)

    def _catch_up(self, sequence: KVSequence) -> None:
        known = len(sequence.tokens) - 1
        self.engine.prefill_chunk(sequence, chunk_length(sequence.computed, known, self.config.chunk_tokens))

    def _step(self, sequences: list[KVSequence]) -> list[list[SampledToken]]:
        """One step of those that have room; the next plan makes room for the others, which draw nothing."""
        ready = [self.engine.grow(sequence) for sequence in sequences]
        moving = [sequence for sequence, has_room in zip(sequences, ready, strict=True) if has_room]
        drawn = iter(self._drawn(moving) if moving else ())
        return [next(drawn) if has_room else [] for has_room in ready]

    def _drawn(self, sequences: list[KVSequence]) -> list[list[SampledToken]]:
        if self.config.speculative_tokens:
            return self.engine.speculative_step(sequences, self.config.speculative_tokens)
        return [[token] for token in self.engine.decode_step(sequences)]

    def _deliver_all(self, active: _Active, tokens: Sequence[SampledToken]) -> None:
        """The first is part of the sequence already; the others become so as long as the request goes on."""
        for position, token in enumerate(tokens):
            if active.cancelled or active.key not in self._running:
                return
            if position:
                self.engine.accept(active.sequence, token)
            self._deliver(active, token)

    def _deliver(self, active: _Active, token: SampledToken) -> None:
        job, sequence = active.job, active.sequence
        reason = finish_reason(sequence, token.token_id, self.engine)
        if not self._emit(job, token_output(job, self.id, sequence, token, reason)):
            self._remove(active)
            self._fail(job, f"nobody reads the outputs of channel {job.channel!r}")
        elif reason is not None:
            self._remove(active)
            self._report(RequestFinished(job.request.id, job.request.attempt, sequence.output_tokens, reason))

    def _forget_cancelled(self) -> None:
        for active in [*self._running.values(), *self._waiting.values()]:
            if active.cancelled:
                self._remove(active)

    def _fail_all(self, message: str) -> None:
        for active in list(self._running.values()):
            self._remove(active)
            self._fail(active.job, message)

    def _remove(self, active: _Active) -> None:
        """Give back all that a request holds here, and never take this attempt again."""
        self._running.pop(active.key, None)
        self._waiting.pop(active.key, None)
        self._end(active.key, done=True)
        if active.holds_blocks:
            self._keep_answer(active)
            self.engine.finish(active.sequence)
        self._receiver.blocks_freed()

    def _keep_answer(self, active: _Active) -> None:
        """Let the tiers below write what the conversation's next turn will begin with."""
        sequence = active.sequence
        prompt_blocks = len(sequence.prompt.hashes)
        self.store.keep(
            sequence.hashes[: sequence.named], active.job.request.traffic_class, max(1, sequence.named - prompt_blocks)
        )


def _take_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
