"""One stage of a prefill worker that is a pipeline: a share of the layers, their weights, and the bytes of their KV.

It computes what it is sent, in order, in one thread, and offers and fetches KV of its layers in others meanwhile. It plans
nothing: which blocks there are, and what they hold, is known to the first stage (`staged.py`), whose block ids are valid here.
A plain class; its first stage makes it a Ray actor, tests use it as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from models.base import ForwardBatch
from models.llama import Llama
from workers.block_pool import BlockId
from workers.config import WorkerConfig
from workers.device_cache import DeviceCache
from workers.exchange import LocalExchange
from workers.kv_transfer.base import KVTicket, KVTransport
from workers.kv_transfer.paired import PairedTransports

TRANSFER_THREADS = 4


@dataclass(frozen=True, slots=True)
class StageParts:
    model: Llama
    cache: DeviceCache
    transports: Mapping[str, KVTransport]


BuildStage: TypeAlias = Callable[[WorkerConfig, int], StageParts]


class PrefillStage:
    """The `number`-th stage of the worker that `config` describes, counted from 0; never the first."""

    def __init__(self, config: WorkerConfig, number: int, build: BuildStage) -> None:
        parts = build(config, number)
        self._model, self.cache = parts.model, parts.cache
        self.transport = PairedTransports(self.cache.kv, parts.transports)
        self.transport.register(self.cache.rows)
        self._exchange = LocalExchange(self.cache, self.transport, config.lease_s)
        self._lease_s = config.lease_s
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._transfer = ThreadPoolExecutor(TRANSFER_THREADS, thread_name_prefix="kv-transfer")
        self._turn = asyncio.Condition()
        self._next = 0

    async def loaded(self) -> None:
        """Answered once the stage can compute."""

    async def alive(self) -> None:
        """Never returns: its failure is the news that this process is gone."""
        await asyncio.Event().wait()

    async def forward(self, number: int, batch: ForwardBatch, hidden: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Compute the `number`-th batch, after all before it, whatever the order in which calls start. The last stage answers
        with logits, another with hidden states."""
        async with self._turn:
            await self._turn.wait_for(lambda: number == self._next)
            computing = self._run(self._compute, self._model.forward_stage, batch, hidden, self.cache.paged)
            self._next += 1
            self._turn.notify_all()
        output: Tensor = await computing
        last = self._model.layers.stop == self.cache.kv.num_layers
        return (output, None) if last else (None, output)

    async def publish(self, ids: Sequence[BlockId], layers: range, names: Sequence[str]) -> KVTicket:
        """Offer blocks in some of the layers here, over the first transport of `names`."""
        blocks = self.cache.blocks(ids, layers)
        ticket: KVTicket = await self._run(self._transfer, self.transport.offer_over, names, blocks, self._lease_s)
        return ticket

    async def fetch(self, ticket: KVTicket, ids: Sequence[BlockId], first: int) -> None:
        await self._run(self._transfer, self._exchange.fetch, ticket, ids, first)

    async def release(self, ticket_id: str) -> None:
        self._exchange.release(ticket_id)

    async def expire(self) -> None:
        self._exchange.expire()

    async def close(self) -> None:
        self._compute.shutdown()
        self._transfer.shutdown()
        self._exchange.close()

    def _run(self, pool: ThreadPoolExecutor, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(pool, function, *args)
