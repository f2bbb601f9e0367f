"""An `EngineClient` that does what a test tells it to, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conductor.core.messages import GenerationJob, TokenLogprob, TokenOutput
from conductor.core.types import (
    Decision,
    FinishReason,
    Placement,
    Rejection,
    RejectReason,
    ReusePlan,
    TTFTEstimate,
)
from conductor.engine_client import ClusterStatus
from tests.doubles.byte_tokenizer import EOS

ESTIMATE = TTFTEstimate(queue_s=0.1, transfer_s=0.02, prefill_s=0.005, low_s=0.1, high_s=0.2, calibrated=True)


@dataclass
class Script:
    """What happens to the next requests. `tokens` are emitted one by one, then `finish`; `hold_after` tokens the stream stops
    until it is cancelled; `rejection` refuses; `raises` fails the submission."""

    tokens: Sequence[int] = tuple(b"hello")
    finish: FinishReason = FinishReason.STOP
    ends_with_eos: bool = False
    hold_after: int | None = None
    hold_submit: bool = False
    delay_s: float = 0.0
    reused_tokens: int = 0
    expected_tokens: int | None = None  # to be reused, as the placement has it; None where it was right
    rejection: RejectReason | None = None
    retry_after_s: float = 2.5
    raises: Exception | None = None
    message: str | None = None
    actual: Mapping[str, Any] | None = None  # what the record of a decision tells of its outcome


def healthy() -> ClusterStatus:
    return ClusterStatus(True, "", "test-model", {"p0": {"role": "prefill", "queued_requests": 3}}, {"index_blocks": 12.0})


@dataclass
class ScriptedEngine:
    """`jobs` and `cancelled` record calls in order."""

    script: Script = field(default_factory=Script)
    jobs: list[GenerationJob] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    ready: ClusterStatus | Exception = field(default_factory=healthy)
    channel: str = "test-channel"
    picture: Mapping[str, Any] | Exception = field(default_factory=dict)
    refuse_from: int | None = None  # requests from this one on, counted from 0, are refused

    def reset(self) -> None:
        """As new."""
        self.script, self.jobs, self.cancelled, self.refuse_from = Script(), [], [], None
        self.ready, self.picture = healthy(), {}

    async def submit(self, job: GenerationJob) -> Decision:
        self.jobs.append(job)
        if self.script.raises is not None:
            raise self.script.raises
        if self.refuse_from is not None and len(self.jobs) > self.refuse_from:
            return self._rejection(job, RejectReason.OVERLOAD)
        if self.script.hold_submit:
            await asyncio.Event().wait()
        if self.script.rejection is not None:
            return self._rejection(job, self.script.rejection)
        script = self.script
        reuse = ReusePlan(local_tokens=script.reused_tokens if script.expected_tokens is None else script.expected_tokens)
        return Placement(job.request.id, 1, "p0", "d0", reuse, ESTIMATE, tbt_s=0.05)

    def _rejection(self, job: GenerationJob, reason: RejectReason) -> Rejection:
        return Rejection(
            job.request.id,
            reason,
            "predicted TTFT 3.0 s is above the objective 1.0 s",
            self.script.retry_after_s,
            best_worker="p0",
            predicted_s=3.0,
            predicted_low_s=2.5,
            predicted_high_s=float("inf"),
            objective_s=1.0,
            shortfall_s=2.0,
        )

    async def cache_command(self, action: str, name: int | None) -> Mapping[str, Any]:
        """The question itself, as if a worker had answered it."""
        return {"p0": {"asked": action, "hash": name}}

    async def outputs(self, request_id: str) -> AsyncIterator[TokenOutput]:
        job = next(job for job in self.jobs if job.request.id == request_id)
        tokens = [*self.script.tokens, *([EOS] if self.script.ends_with_eos else [])][: job.sampling.max_tokens]
        for index, token in enumerate(tokens):
            if index == self.script.hold_after:
                await asyncio.Event().wait()
            if self.script.delay_s:
                await asyncio.sleep(self.script.delay_s)
            yield self._output(job, index, token, last=index == len(tokens) - 1)
        if self.script.finish in (FinishReason.FAILED, FinishReason.CANCELLED):
            yield TokenOutput(request_id, 1, len(tokens), None, "p0", self.script.finish, message=self.script.message)

    def _output(self, job: GenerationJob, index: int, token: int, *, last: bool) -> TokenOutput:
        broken = self.script.finish in (FinishReason.FAILED, FinishReason.CANCELLED)
        wanted = job.sampling.logprobs
        top = tuple(TokenLogprob(ord("a") + rank, -0.5 - rank) for rank in range(wanted or 0))
        return TokenOutput(
            job.request.id,
            1,
            index,
            token,
            "p0" if index == 0 else "d0",
            finish_reason=self.script.finish if last and not broken else None,
            logprob=None if wanted is None else -0.25,
            top_logprobs=top,
            reused_tokens=self.script.reused_tokens if index == 0 else None,
        )

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def decision(self, request_id: str) -> Mapping[str, Any] | None:
        tenant = next((job.request.tenant for job in self.jobs if job.request.id == request_id), None)
        known = {"request_id": request_id, "tenant": tenant, "candidates": [{"worker": "p0", "queue_s": 0.1}]}
        if self.script.actual is not None:
            known |= {"attempt": 1, "actual": self.script.actual}
        return None if tenant is None else known

    async def overview(self) -> Mapping[str, Any]:
        if isinstance(self.picture, Exception):
            raise self.picture
        return self.picture

    async def status(self) -> ClusterStatus:
        if isinstance(self.ready, Exception):
            raise self.ready
        return self.ready
