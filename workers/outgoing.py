"""The KV of one prompt on its way out: which blocks and layers are offered, which have arrived, and what holds them meanwhile.

KV goes out in parts: the reused prefix at once, as far as the target does not hold it itself, and of every chunk one group of
layers after the other, each as soon as it is computed, while the next is. A part pins its blocks from the moment it is cut
until its offer ends, because a block may be replaced in the prompt's table by an equal one that was cached meanwhile. Parts
that the decode worker has taken are let go; the others go along with the hand-over itself. For one event loop, but for `cut`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from conductor.core.types import WorkerId
from workers.batching import MAX_GROUPS, READY_GROUPS, layer_groups
from workers.block_pool import BlockId
from workers.device_cache import DeviceCache
from workers.exchange import Exchange, split
from workers.jobs import HandoverPart, PartKey
from workers.kv_transfer.base import KVTicket
from workers.kv_transfer.paired import PairedTransports

Deliver = Callable[[HandoverPart], Awaitable[bool]]
"""Lets the decode worker take a part; tells whether it has."""

Needed = Callable[[range, range], Sequence[tuple[range, range]]]
"""The (blocks, layers) of some blocks in some layers that the decode worker needs: see `needed_state.py`."""


@dataclass(frozen=True, slots=True)
class Sender:
    """What a worker's outgoing KV shares. `move` runs a function in a transfer thread, `spawn` starts a task."""

    cache: DeviceCache
    transport: PairedTransports
    exchange: Exchange
    move: Callable[..., Awaitable[Any]]
    spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
    lease_s: float

    def publish(self, part: Part, peer: WorkerId | None) -> KVTicket:
        return self.exchange.publish(part.ids, part.layers, peer)


@dataclass(frozen=True, slots=True)
class Part:
    """Pinned blocks `first_block...` of a prompt, in some layers."""

    first_block: int
    ids: tuple[BlockId, ...]
    layers: range


class Outgoing:
    """`deliver` is called for each part that can be sent early; `peer` names the target, once it is known; `needed` tells which
    blocks in which layers the target has use for."""

    def __init__(self, sender: Sender, deliver: Deliver, peer: Callable[[], WorkerId | None], needed: Needed) -> None:
        self.sent_blocks = 0
        self._sender = sender
        self._deliver = deliver
        self._peer = peer
        self._needed = needed
        self._offers: list[asyncio.Task[HandoverPart]] = []
        self._pins: list[Sequence[BlockId]] = []
        self._delivered: set[PartKey] = set()
        self._prefix: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def started(self) -> bool:
        return self._prefix is not None or bool(self._offers)

    # --- cutting, in any thread ---------------------------------------------------------------------------------------

    def groups(self, blocks: int, most: int = MAX_GROUPS) -> list[range]:
        """The groups of layers in which so many blocks are sent, each from one place: while one is read, the next can be
        written."""
        kv, cuts = self._sender.cache.kv, self._sender.exchange.cuts
        groups = layer_groups(kv.num_layers, blocks * kv.layer_block_bytes, most) if blocks else []
        return [run for group in groups for run in split(group, cuts)]

    def cut(self, table: Sequence[BlockId], blocks: range, layers: range) -> list[Part]:
        """Take hold of some blocks of the table as it is now, where they are needed. Every part that is cut must be sent."""
        parts = [
            Part(needed.start, tuple(table[needed.start : needed.stop]), chosen)
            for needed, chosen in self._needed(blocks, layers)
        ]
        for part in parts:
            self._sender.cache.retain(part.ids)
        return parts

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, part: Part) -> None:
        """Offer a part, and let the decode worker take it as soon as it is offered."""
        if self._closed:
            self._sender.cache.release(part.ids)
            return
        self._pins.append(part.ids)
        self._offers.append(self._sender.spawn(self._send(part)))

    def send_prefix(self, table: Sequence[BlockId], blocks: int, held_there: Callable[[], Awaitable[int]]) -> None:
        """Send the first `blocks` of the table, which stay in it, without those that the target says it holds."""
        self.sent_blocks = blocks
        if blocks:
            self._prefix = self._sender.spawn(self._send_prefix(table, blocks, held_there))

    async def _send_prefix(self, table: Sequence[BlockId], blocks: int, held_there: Callable[[], Awaitable[int]]) -> None:
        missing = range(await held_there(), blocks)
        for layers in self.groups(len(missing), READY_GROUPS):
            for part in self.cut(table, missing, layers):
                self.send(part)

    async def rest(self) -> list[HandoverPart]:
        """The parts that have not been taken, with tickets that live long enough to be."""
        if self._prefix is not None:
            await asyncio.shield(self._prefix)
        parts = [await asyncio.shield(offer) for offer in list(self._offers)]
        return [await self._renewed(part) for part in parts if part.key not in self._delivered]

    async def close(self) -> None:
        """End all offers and unpin their blocks, once no transfer thread reads them any more."""
        self._closed = True
        if self._prefix is not None:
            self._prefix.cancel()
            await asyncio.gather(self._prefix, return_exceptions=True)
        for part in await asyncio.gather(*self._offers, return_exceptions=True):
            if isinstance(part, HandoverPart):
                self._sender.exchange.release(part.ticket.id)
        pins, self._pins = self._pins, []
        for ids in pins:
            self._sender.cache.release(ids)

    async def _send(self, part: Part) -> HandoverPart:
        offered = HandoverPart(part.first_block, await self._sender.move(self._sender.publish, part, self._peer()))
        if not self._closed:
            self._sender.spawn(self._deliver_early(offered))
        return offered

    async def _deliver_early(self, part: HandoverPart) -> None:
        if await self._deliver(part):
            self._delivered.add(part.key)
            self._sender.exchange.release(part.ticket.id)

    async def _renewed(self, part: HandoverPart) -> HandoverPart:
        """The part, offered once more if much of its lease has passed or its transport has failed."""
        peer = self._peer()
        failed = peer is not None and self._sender.transport.shunned(peer, part.ticket.transport)
        if not failed and part.ticket.expires_s - time.time() > self._sender.lease_s / 2:
            return part
        position = next(i for i, offer in enumerate(self._offers) if offer.result() is part)
        again = Part(part.first_block, tuple(self._pins[position]), part.layers)
        self._pins.append(again.ids)
        self._sender.cache.retain(again.ids)
        self._offers.append(self._sender.spawn(self._publish_again(again)))
        return await asyncio.shield(self._offers[-1])

    async def _publish_again(self, part: Part) -> HandoverPart:
        return HandoverPart(part.first_block, await self._sender.move(self._sender.publish, part, self._peer()))
