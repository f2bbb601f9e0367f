"""Prefill and decode workers for tests to drive: a model that can be held up, and runs from prompt to output."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.workers.actor_doubles import (
    Cluster,
    make_job,
    place,
)
from tests.workers.doubles import ChainModel

PROMPT = tuple((7 * i) % 91 for i in range(26))
OTHER = tuple((5 * i + 3) % 89 for i in range(14))


class GatedModel(ChainModel):
    """Holds every forward pass until it is let through; `entered` tells that one is waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def forward(self, *args: Any, on_layer: Callable[[int], None] | None = None) -> Tensor:
        if self.closed:
            self.entered.release()
            assert self.gate.acquire(timeout=20)
        return super().forward(*args, on_layer=on_layer)

    def let_through(self) -> None:
        self.closed = False
        for _ in range(100):
            self.gate.release()

    async def until_entered(self) -> None:
        await asyncio.to_thread(self.entered.acquire, timeout=20)


async def pair(cluster: Cluster, **changes: Any) -> None:
    await cluster.add("p0", **changes)
    await cluster.add("d0", **changes)


async def run(cluster: Cluster, request_id: str, tokens: tuple[int, ...] = PROMPT, max_tokens: int = 8) -> list[int | None]:
    job = make_job(request_id, tokens, max_tokens)
    await cluster.submit(job, place(job, "p0", "d0"))
    return await cluster.output_of(request_id)
