"""Workers without a model, for the real control path on a real Ray: the actor protocol, tokens from arithmetic, honest timing.

Token `i` of a request is a function of its prompt's first token and `i`, whoever produces it, as greedy decoding would have it.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from conductor.core.cost_profile import CostProfile
from conductor.core.events import (
    BlocksStored,
    Event,
    HandoverFinished,
    IndexSnapshot,
    PrefillFinished,
    PrefillStarted,
    RequestFinished,
    TransferFinished,
)
from conductor.core.messages import GenerationJob, TokenOutput
from conductor.core.types import FinishReason, Placement, Role, Stamp, Tier, WorkerSpec
from conductor.mailbox import Mailbox

BLOCK_TOKENS = 4
PROFILE = CostProfile(0.01, 1e-4, 0.0, 0.01, 0.0, 0.0, kv_bytes_per_token=1, block_tokens=BLOCK_TOKENS)


def expected_tokens(first: int, count: int) -> list[int]:
    """What a request whose prompt begins with `first` generates."""
    return [(31 * first + 7 * index) % 1000 for index in range(count)]


@dataclass(frozen=True)
class StandInConfig:
    worker_id: str
    role: Role
    step_s: float = 0.05
    fails_to_start: bool = False
    model: str = ""
    holds: tuple[int, ...] = ()  # hashes of cached blocks


class StandInWorker:
    """Both roles: a prefill worker hands over to its decode worker after one step."""

    def __init__(self, config: StandInConfig) -> None:
        if config.fails_to_start:
            raise ValueError("the weights file is damaged")
        self._config = config
        self._conductor: Any = None
        self._epoch = 0
        self._mailboxes: dict[str, Mailbox[TokenOutput]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    async def describe(self) -> WorkerSpec:
        return WorkerSpec(
            self._config.worker_id, self._config.role, "node", PROFILE, {Tier.DEVICE: 200_000}, model=self._config.model
        )

    async def attach(self, conductor: Any, epoch: int) -> None:
        self._conductor, self._epoch = conductor, epoch
        held = {Tier.DEVICE: self._config.holds} if self._config.holds else {}
        await conductor.report.remote([IndexSnapshot(Stamp(self._config.worker_id, epoch, 1), held)])

    async def alive(self) -> None:
        await asyncio.Event().wait()

    async def pid(self) -> int:
        return os.getpid()

    async def stats(self) -> dict[str, Any]:
        return {"queued": 0, "running": len(self._running), "pinned_blocks": 0, "offers": 0}

    async def running(self) -> int:
        return len(self._running)

    async def outputs(self, channel: str) -> AsyncIterator[list[TokenOutput]]:
        async for batch in self._mailboxes.setdefault(channel, Mailbox()).batches():
            yield batch

    async def prefill(self, job: GenerationJob, placement: Placement, decode: Any, source: Any) -> None:
        self._start(job, self._prefill(job, placement, decode))

    async def accept_handover(self, job: GenerationJob, placement: Placement, first: TokenOutput, parts: Sequence[Any]) -> None:
        self._start(job, self._decode(job, first.index + 1))

    async def cancel(self, request_id: str, attempt: int) -> None:
        if task := self._running.pop(request_id, None):
            task.cancel()

    def kill(self) -> int:
        """End everything at once, without a word to anybody; how many requests that were."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        return len(running)

    async def snapshot(self) -> None: ...

    async def pull_blocks(self, transfer_id: str, source: Any, blocks: Sequence[int]) -> None:
        """What is copied here is here."""
        await self._report(BlocksStored(Stamp(self._config.worker_id, self._epoch, 2), Tier.DEVICE, None, tuple(blocks)))
        await self._report(TransferFinished(transfer_id, len(blocks), 0.0))

    async def drop_blocks(self, blocks: Sequence[int]) -> None: ...

    def _start(self, job: GenerationJob, work: Any) -> None:
        request_id = job.request.id
        task = self._running[request_id] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._running.pop(request_id, None))

    async def _prefill(self, job: GenerationJob, placement: Placement, decode: Any) -> None:
        request = job.request
        await self._report(PrefillStarted(request.id, request.attempt, self._config.worker_id))
        await asyncio.sleep(self._config.step_s)
        first = self._emit(job, request.emitted_tokens)
        await self._report(PrefillFinished(request.id, request.attempt, self._config.worker_id, 0, self._config.step_s))
        if first.finish_reason is None:
            await decode.accept_handover.remote(job, placement, first, [])
            await self._report(HandoverFinished(request.id, request.attempt, 0, 0.0))
        else:
            await self._finish(job, first)

    async def _decode(self, job: GenerationJob, index: int) -> None:
        while True:
            await asyncio.sleep(self._config.step_s)
            output = self._emit(job, index)
            index += 1
            if output.finish_reason is not None:
                return await self._finish(job, output)

    def _emit(self, job: GenerationJob, index: int) -> TokenOutput:
        (first,) = struct.unpack_from("<i", job.tokens)
        request, last = job.request, index + 1 == job.sampling.max_tokens
        token = expected_tokens(first, index + 1)[-1]
        finish = FinishReason.LENGTH if last else None
        output = TokenOutput(request.id, request.attempt, index, token, self._config.worker_id, finish)
        self._mailboxes.setdefault(job.channel, Mailbox()).put(output)
        return output

    async def _finish(self, job: GenerationJob, last: TokenOutput) -> None:
        await self._report(RequestFinished(job.request.id, job.request.attempt, last.index + 1, FinishReason.LENGTH))

    async def _report(self, event: Event) -> None:
        await self._conductor.report.remote([event])
