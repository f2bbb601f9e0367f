"""A hand-over on its way in: blocks reserved for a prompt, the parts of its KV that have come, and how it ends.

Reservations are all or nothing and served in order of arrival, so two hand-overs never wait for each other's blocks. Parts may
come early, in any order, more than once. Whatever goes wrong, the blocks are given back only when no transfer thread writes
into them any more. For one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from conductor.core.messages import GenerationJob
from conductor.core.types import WorkerId
from workers.block_pool import OutOfBlocks
from workers.engine import Engine
from workers.jobs import HandoverPart, PartKey
from workers.kv_transfer.blocks import KVBlocks
from workers.kv_transfer.paired import PairedTransports
from workers.sequence import KVSequence, Prompt


class HandoverRefused(Exception):
    """The prompt's KV could not be taken; nothing of it is kept."""


@dataclass(slots=True)
class Incoming:
    """One hand-over. `deadline_s` (event loop time) moves on with every part; once `dropped`, it takes nothing more."""

    job: GenerationJob
    source: WorkerId
    prompt: Prompt
    deadline_s: float
    sequence: KVSequence | None = None
    reserving: asyncio.Task[None] | None = None
    accepting: asyncio.Task[None] | None = None
    fetches: dict[PartKey, asyncio.Task[None]] = field(default_factory=dict)
    dropped: bool = False
    nbytes: int = 0
    transfer_s: float = 0.0


class Receiver:
    """Reserves blocks for hand-overs and fetches their parts. `move` runs a function in a transfer thread."""

    def __init__(
        self, engine: Engine, transport: PairedTransports, move: Callable[..., Awaitable[None]], fetch_timeout_s: float
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._move = move
        self._fetch_timeout_s = fetch_timeout_s
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    def blocks_freed(self) -> None:
        self._freed.set()

    async def reserve(self, incoming: Incoming, may_take: Callable[[], bool]) -> None:
        """Wait for blocks, in turn."""
        async with self._turn:
            while True:
                self._freed.clear()
                if may_take():
                    sequence = self._engine.adopt(incoming.prompt)
                    if not isinstance(sequence, OutOfBlocks):
                        incoming.sequence = sequence
                        return
                await self._freed.wait()

    async def receive(self, incoming: Incoming, parts: Sequence[HandoverPart]) -> None:
        """Fetch the parts that have not come yet, all at once."""
        assert incoming.reserving is not None
        await asyncio.wait((incoming.reserving,))
        if incoming.dropped:
            raise HandoverRefused("the request was cancelled")
        for part in parts:
            known = incoming.fetches.get(part.key)
            if known is None or (known.done() and known.exception() is not None):
                incoming.fetches[part.key] = asyncio.ensure_future(self._fetch(incoming, part))
        await asyncio.shield(asyncio.gather(*(incoming.fetches[part.key] for part in parts)))

    async def _fetch(self, incoming: Incoming, part: HandoverPart) -> None:
        sequence = incoming.sequence
        if sequence is None or incoming.dropped:
            raise HandoverRefused("the request was cancelled")
        blocks = part.blocks
        if blocks.start < 0 or blocks.stop > len(sequence.table):
            raise HandoverRefused(f"blocks {blocks.start}..{blocks.stop} lie outside of the prompt's {len(sequence.table)}")
        if blocks.stop <= sequence.named:
            return  # cached here already
        began_s = time.perf_counter()
        with self._transport.meter.transfer() as moved:
            await self._move(self._fetch_and_write, sequence, part)
            moved.was(incoming.source, part.ticket.transport, part.ticket.nbytes)
        incoming.nbytes += part.ticket.nbytes
        incoming.transfer_s += time.perf_counter() - began_s

    def _fetch_and_write(self, sequence: KVSequence, part: HandoverPart) -> None:
        def fill(into: KVBlocks, skip: int) -> None:
            self._transport.fetch(part.ticket, into, self._fetch_timeout_s, skip)

        self._engine.receive(sequence, part.blocks, fill, part.layers)

    async def settle(self, incoming: Incoming) -> KVSequence | None:
        """Wait until nothing writes into a dropped hand-over any more; the sequence whose blocks are to be given back."""
        if incoming.reserving is not None:
            incoming.reserving.cancel()
            await asyncio.gather(incoming.reserving, return_exceptions=True)
        await asyncio.gather(*incoming.fetches.values(), return_exceptions=True)
        sequence, incoming.sequence = incoming.sequence, None
        return sequence
