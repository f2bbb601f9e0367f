"""A request in flight: submit its jobs, follow their tokens, and end every one of them exactly once.

`Run` owns the promise towards the cluster: whatever way a request ends here (finished, stop string, error, client gone,
server going down), each job that was submitted and did not end by itself is cancelled once, in `close`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeAlias, TypeVar

from conductor.core.messages import GenerationJob, TokenOutput
from conductor.core.types import FinishReason, Placement, Rejection
from conductor.engine_client import EngineClient
from conductor.gateway.assembler import Delta, TextAssembler
from conductor.gateway.errors import ApiError, decision_id, from_rejection, unavailable
from conductor.gateway.plan import Plan
from conductor.gateway.served_model import Tokenizer
from conductor.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

OnDelta: TypeAlias = Callable[[int, Delta], Awaitable[None]]
Result = TypeVar("Result")


@dataclass(slots=True)
class Times:
    """When a choice reached what, by the monotonic clock; None while it has not."""

    submitted_s: float | None = None
    decided_s: float | None = None
    first_token_s: float | None = None
    second_token_s: float | None = None
    last_token_s: float = 0.0
    ended_s: float | None = None


class Choice:
    """One job from submission to its end."""

    def __init__(self, job: GenerationJob, assembler: TextAssembler, metrics: GatewayMetrics) -> None:
        self.job = job
        self.assembler = assembler
        self.placement: Placement | None = None
        self.reused_tokens = 0
        self.open = False  # submitted, and not known to have ended
        self._metrics = metrics
        self.times = Times()
        self._waiting = False

    def _set_waiting(self, waiting: bool) -> None:
        """Waiting is a request that was submitted and has neither a token nor an end yet."""
        if waiting != self._waiting:
            self._waiting = waiting
            self._metrics.waiting += 1 if waiting else -1

    def end(self) -> None:
        """Nothing more comes."""
        self.open = False
        self.times.ended_s = monotonic()
        self._set_waiting(False)

    async def submit(self, engine: EngineClient) -> Placement:
        self.open = True
        self._set_waiting(True)
        self.times.submitted_s = monotonic()
        decision = await engine.submit(self.job)
        self.times.decided_s = monotonic()
        if isinstance(decision, Rejection):
            self.end()
            self._metrics.rejected(decision.reason.value)
            raise from_rejection(decision)
        self.placement = decision
        return decision

    def take(self, output: TokenOutput) -> Delta:
        """Book an output and turn it into text; raises `ApiError` when the engine gave up."""
        if output.token_id is not None:
            self._book_token(output)
        if output.finish_reason is not None:
            self.end()
        delta = self.assembler.push(output)
        if output.finish_reason in (FinishReason.FAILED, FinishReason.CANCELLED):
            raise self._given_up(output)
        return delta

    def _book_token(self, output: TokenOutput) -> None:
        now_s, times = monotonic(), self.times
        if times.first_token_s is None:
            times.first_token_s = now_s
            self._set_waiting(False)
            self.reused_tokens = min(output.reused_tokens or 0, self.job.request.prompt_tokens)
            self._metrics.first_token(now_s - (times.submitted_s or now_s), self.placement.ttft if self.placement else None)
            if self.placement is not None and output.reused_tokens is not None:
                self._metrics.reuse(self.placement.prefill, self.placement.reuse.reused_tokens, self.reused_tokens)
        else:
            if times.second_token_s is None:
                times.second_token_s = now_s
            self._metrics.next_token(now_s - times.last_token_s)
        times.last_token_s = now_s

    def _given_up(self, output: TokenOutput) -> ApiError:
        kind = "failed" if output.finish_reason is FinishReason.FAILED else "cancelled"
        error = unavailable(output.message or f"the generation was {kind} by the cluster", f"generation_{kind}", 1.0)
        error.headers.update(decision_id(self.job.request.id))
        return error


class Run:
    """All choices of one request."""

    def __init__(self, plan: Plan, engine: EngineClient, tokenizer: Tokenizer, metrics: GatewayMetrics) -> None:
        self.plan = plan
        self._engine = engine
        self._metrics = metrics
        self.choices = [
            Choice(job, TextAssembler(tokenizer.detokenizer(), plan.stops, plan.silent_ids), metrics) for job in plan.jobs
        ]

    async def submit(self) -> tuple[Placement, ...]:
        """Placements of all jobs; raises `ApiError` as soon as one is refused."""
        if len(self.choices) == 1:
            return (await self._submit_one(self.choices[0]),)
        return tuple(await all_or_none([self._submit_one(choice) for choice in self.choices]))

    async def _submit_one(self, choice: Choice) -> Placement:
        try:
            return await choice.submit(self._engine)
        except ApiError:
            raise
        except Exception as problem:
            logger.exception("request %s could not be submitted", choice.job.request.id)
            raise self._unreachable(choice) from problem

    async def follow(self, on_delta: OnDelta) -> None:
        """Await `on_delta(choice, delta)` for every piece of text until all choices have ended."""
        if len(self.choices) == 1:
            await self._follow_one(0, on_delta)
        else:
            await all_or_none([self._follow_one(index, on_delta) for index in range(len(self.choices))])

    async def _follow_one(self, index: int, on_delta: OnDelta) -> None:
        choice = self.choices[index]
        try:
            async for output in self._engine.outputs(choice.job.request.id):
                delta = choice.take(output)
                if delta.text or delta.finish is not None or delta.entries:
                    await on_delta(index, delta)
                if delta.finish is not None:
                    return
        except ApiError:
            raise
        except Exception as problem:
            logger.exception("request %s lost its output", choice.job.request.id)
            raise self._unreachable(choice) from problem
        finally:
            await self._release(choice)
        raise self._unreachable(choice)

    def _unreachable(self, choice: Choice) -> ApiError:
        error = unavailable("the cluster behind the gateway does not answer", "engine_unavailable", 1.0)
        error.headers.update(decision_id(choice.job.request.id))
        return error

    async def close(self) -> None:
        """Cancel what has not ended; book the totals. Safe to call once, from any state."""
        if any(choice.placement for choice in self.choices):
            self._metrics.tokens(self.plan.prompt_tokens, self.reused_tokens, self.output_tokens)
        for choice in self.choices:
            await self._release(choice)

    async def _release(self, choice: Choice) -> None:
        """Cancel a job that has not ended, once."""
        if not choice.open:
            return
        choice.end()
        self._metrics.cancelled()
        try:
            await self._engine.cancel(choice.job.request.id)
        except Exception:
            logger.exception("request %s could not be cancelled", choice.job.request.id)

    @property
    def output_tokens(self) -> int:
        return sum(choice.assembler.output_tokens for choice in self.choices)

    @property
    def reused_tokens(self) -> int:
        """Reused tokens of the prompts, each prompt counted by its first choice."""
        per_prompt = max(1, len(self.choices) // max(1, self.plan.prompts))
        return sum(choice.reused_tokens for choice in self.choices[::per_prompt])


async def all_or_none(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results in order; the first failure cancels the rest and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except* ApiError as problems:
        first = next(problem for problem in leaves(problems) if isinstance(problem, ApiError))
    else:
        return [task.result() for task in tasks]
    raise first


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for problem in group.exceptions:
        if isinstance(problem, BaseExceptionGroup):
            yield from leaves(problem)
        else:
            yield problem
