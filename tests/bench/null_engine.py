"""An `EngineClient` with nothing behind it: measures what the gateway itself costs.

Every request is placed at once and answered with `echo_tokens` tokens (or its own limit, if lower). With `tbt_s` the tokens
come one by one at that pace, otherwise each after one turn of the event loop, as tokens of a real engine do: never two at
once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from conductor.core.messages import GenerationJob, TokenOutput
from conductor.core.types import Decision, FinishReason, Placement, ReusePlan, TTFTEstimate
from conductor.engine_client import ClusterStatus

ESTIMATE = TTFTEstimate(queue_s=0.0, transfer_s=0.0, prefill_s=0.001, low_s=0.0, high_s=0.002, calibrated=True)
LETTER = ord("a")


class NullEngine:
    """Mutable: remembers the token budgets of requests in flight, so `open` is zero when all have ended."""

    channel = "null"

    def __init__(self, echo_tokens: int = 32, tbt_s: float = 0.0) -> None:
        self._echo_tokens = echo_tokens
        self._tbt_s = tbt_s
        self._budgets: dict[str, int] = {}
        self.cancels = 0

    @property
    def open(self) -> int:
        return len(self._budgets)

    async def submit(self, job: GenerationJob) -> Decision:
        self._budgets[job.request.id] = min(self._echo_tokens, job.sampling.max_tokens)
        return Placement(job.request.id, 1, "null-prefill", "null-decode", ReusePlan(), ESTIMATE, None)

    async def outputs(self, request_id: str) -> AsyncIterator[TokenOutput]:
        budget = self._budgets[request_id]
        for index in range(budget):
            await asyncio.sleep(self._tbt_s)
            last = index == budget - 1
            if last:
                del self._budgets[request_id]
            yield TokenOutput(
                request_id,
                1,
                index,
                LETTER,
                "null-decode",
                finish_reason=FinishReason.LENGTH if last else None,
                reused_tokens=0 if index == 0 else None,
            )

    async def cache_command(self, action: str, name: int | None) -> Mapping[str, Any]:
        return {}

    async def cancel(self, request_id: str) -> None:
        self.cancels += 1
        self._budgets.pop(request_id, None)

    async def decision(self, request_id: str) -> Mapping[str, Any] | None:
        return None

    async def overview(self) -> Mapping[str, Any]:
        return {}

    async def status(self) -> ClusterStatus:
        return ClusterStatus(True, "", "null")
