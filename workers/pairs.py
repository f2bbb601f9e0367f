"""Gets to know peers: has each pair of workers measured once, beside the work, over what both have.

The side that meets the other first brings it about; the one that offers ends up knowing the order. Whatever goes wrong leaves
the order of the configuration in force, and the next contact tries again. What transfers then show of a link is news for the
Conductor, whenever it has changed. For one event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from conductor.core.events import LinkMeasured
from conductor.core.types import WorkerId
from workers.kv_transfer.base import KVTicket
from workers.kv_transfer.link_meter import LinkSpeed
from workers.kv_transfer.paired import PairedTransports

logger = logging.getLogger(__name__)

LINK_CHANGE = 0.05  # of the bandwidth last told; less is not worth telling


class Pairs:
    """`own_id` is this worker's; `move` runs a function in a transfer thread, `spawn` starts a task."""

    def __init__(
        self,
        own_id: WorkerId,
        transports: PairedTransports,
        move: Callable[..., Awaitable[Any]],
        spawn: Callable[[Coroutine[Any, Any, Any]], Any],
    ) -> None:
        self._own_id = own_id
        self._transports = transports
        self._move = move
        self._spawn = spawn
        self._met: set[WorkerId] = set()
        self._told: dict[WorkerId, LinkSpeed] = {}

    def offering_to(self, peer: WorkerId, handle: Any) -> None:
        """This worker is about to offer KV to `peer`."""
        if not self._transports.measured(peer):
            self._once(peer, lambda: self._rank_there(peer, handle))

    def fetching_from(self, peer: WorkerId, handle: Any) -> None:
        """This worker fetches KV from `peer`, which does not know its handle."""
        self._once(peer, lambda: self._rank_here(peer, handle))

    def link_news(self, peer: WorkerId, epoch: int) -> LinkMeasured | None:
        """What the link from a peer is worth, when that has changed since it was last told."""
        known = self._transports.speed_from(peer)
        if known is None:
            return None
        name, speed = known
        told = self._told.get(peer)
        if told is not None and abs(speed.bytes_per_s / told.bytes_per_s - 1) < LINK_CHANGE:
            return None
        self._told[peer] = speed
        worth = speed.bytes_per_s, speed.shared_bytes_per_s, speed.latency_s
        return LinkMeasured(self._own_id, epoch, peer, name, self._transports.protocols[name], *worth)

    def tell_again(self) -> None:
        """Whoever was told of links has forgotten them."""
        self._told.clear()

    def _once(self, peer: WorkerId, measure: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if len(self._transports.names) > 1 and peer not in self._met:
            self._met.add(peer)
            self._spawn(self._attempt(peer, measure))

    async def _attempt(self, peer: WorkerId, measure: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await measure()
        except Exception as error:
            logger.warning("the transports between %s and %s were not measured: %s", self._own_id, peer, error)
            self._met.discard(peer)

    async def _rank_there(self, peer: WorkerId, handle: Any) -> None:
        tickets: list[KVTicket] = await self._move(self._transports.offer_probes)
        try:
            self._transports.use(peer, await handle.rank_transports.remote(self._own_id, tickets))
        finally:
            for ticket in tickets:
                self._transports.release(ticket.id)

    async def _rank_here(self, peer: WorkerId, handle: Any) -> None:
        tickets: list[KVTicket] = await handle.offer_probes.remote()
        ranked = await self._move(self._transports.rank_probes, peer, tickets)
        await handle.use_transports.remote(self._own_id, ranked)
        for ticket in tickets:
            await handle.release_offer.remote(ticket.id)
