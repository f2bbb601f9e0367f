"""Which of a worker's transports serves which peer: what both have and what is the fastest between them, measured.

A pair is measured once, when it first has to do with each other and without anybody waiting for it: the source offers a probe
over each of its transports, the target fetches them and ranks what came. Until then, and for peers that were never measured,
the order of the configuration holds. A transport that fails a peer is put last for it for a while, so that the next offer
takes the next one; that is logged and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from workers.kv_transfer.base import KVDescriptor, KVTicket, KVTransport, TransferError, TransportUnavailable
from workers.kv_transfer.blocks import KVArray, KVBlocks
from workers.kv_transfer.link_meter import LinkMeter, LinkSpeed

logger = logging.getLogger(__name__)

PROBE_BYTES = 4 << 20
MAX_PROBE_BLOCKS = 64
PROBE_LEASE_S = 30.0
PROBE_ROUNDS = 2
SHUNNED_S = 60.0


class PairedTransports:
    """The transports of one worker, by name, in order of preference. Thread-safe, as they are."""

    def __init__(
        self, kv: KVDescriptor, transports: Mapping[str, KVTransport], clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not transports:
            raise TransportUnavailable("a worker needs at least one transport")
        self.kv = kv
        self.meter = LinkMeter()
        self.fallbacks = 0
        self._transports = dict(transports)
        self._clock = clock
        self._lock = threading.Lock()
        self._ranked: dict[str, tuple[str, ...]] = {}
        self._shunned_until_s: dict[tuple[str, str], float] = {}
        self._transport_of_offer: dict[str, str] = {}
        self._probe: KVBlocks | None = None

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._transports)

    @property
    def protocols(self) -> dict[str, str]:
        return {name: transport.protocol for name, transport in self._transports.items()}

    @property
    def offered(self) -> int:
        return sum(transport.offered for transport in self._transports.values())

    def chosen(self) -> dict[str, str]:
        """The transport in use towards each peer that was measured."""
        return {peer: self.order(peer)[0] for peer in sorted(self._ranked)}

    def speed_from(self, peer: str) -> tuple[str, LinkSpeed] | None:
        """How fast KV comes from a peer, over the transport that it came by last that is measured well enough."""
        known = [(name, speed) for name in self._transports if (speed := self.meter.speed(peer, name)) is not None]
        return max(known, key=lambda item: item[1].bytes_per_s, default=None)

    # --- moving -------------------------------------------------------------------------------------------------------

    def register(self, rows: Sequence[KVArray]) -> None:
        for transport in self._transports.values():
            transport.register(rows)

    def offer(self, blocks: KVBlocks, lease_s: float, peer: str | None = None) -> KVTicket:
        """Publish KV for `peer` over what serves it best."""
        return self.offer_over(self.order(peer), blocks, lease_s)

    def offer_over(self, names: Sequence[str], blocks: KVBlocks, lease_s: float) -> KVTicket:
        """Publish KV over the first of `names`."""
        return self._offer(names[0], blocks, lease_s)

    def fetch(self, ticket: KVTicket, into: KVBlocks, timeout_s: float, first: int = 0) -> None:
        """As the contract says. Raises `TransportUnavailable` for a ticket of a transport that is not here."""
        transport = self._transports.get(ticket.transport)
        if transport is None:
            raise TransportUnavailable(f"transport {ticket.transport!r} is not here; there are {', '.join(self._transports)}")
        transport.fetch(ticket, into, timeout_s, first)

    def release(self, ticket_id: str) -> None:
        with self._lock:
            name = self._transport_of_offer.pop(ticket_id, None)
        if name is not None:
            self._transports[name].release(ticket_id)

    def expire(self) -> tuple[str, ...]:
        over = tuple(ticket_id for transport in self._transports.values() for ticket_id in transport.expire())
        with self._lock:
            for ticket_id in over:
                self._transport_of_offer.pop(ticket_id, None)
        return over

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()

    # --- choosing -----------------------------------------------------------------------------------------------------

    def measured(self, peer: str) -> bool:
        return len(self._transports) == 1 or peer in self._ranked

    def offer_probes(self) -> list[KVTicket]:
        """One ticket for each transport that can offer now, for a peer to rank."""
        tickets = []
        for name in self._transports:
            try:
                tickets.append(self._offer(name, self._probe_memory(), PROBE_LEASE_S))
            except TransferError as error:
                logger.warning("transport %s cannot offer: %s", name, error)
        return tickets

    def rank_probes(self, peer: str, tickets: Sequence[KVTicket]) -> tuple[str, ...]:
        """Fetch a peer's probes, and name the transports that brought them, fastest first."""
        seconds: dict[str, float] = {}
        for ticket in tickets:
            if ticket.transport not in self._transports:
                continue
            try:
                seconds[ticket.transport] = min(self._time_probe(ticket) for _ in range(PROBE_ROUNDS))
            except TransferError as error:
                logger.info("transport %s does not reach from %s: %s", ticket.transport, peer, error)
        ranked = tuple(sorted(seconds, key=lambda name: (seconds[name], name)))
        logger.info("transports from %s, fastest first: %s", peer, ", ".join(ranked) or "none")
        return ranked

    def use(self, peer: str, ranked: Sequence[str]) -> None:
        """Serve a peer in this order, and by what is not ranked after that."""
        with self._lock:
            self._ranked[peer] = tuple(name for name in ranked if name in self._transports)

    def shun(self, peer: str, name: str, reason: str) -> bool:
        """A transport has failed a peer; tells whether another one takes its place."""
        known = self.shunned(peer, name)
        with self._lock:
            self._shunned_until_s[peer, name] = self._clock() + SHUNNED_S
        now_used = self.order(peer)[0]
        if known or now_used == name:
            return now_used != name
        self.fallbacks += 1
        logger.warning("transport %s to %s failed (%s); %s takes its place", name, peer, reason, now_used)
        return True

    def shunned(self, peer: str, name: str) -> bool:
        with self._lock:
            return self._shunned_until_s.get((peer, name), 0.0) > self._clock()

    def order(self, peer: str | None) -> list[str]:
        """The transports for a peer, best first."""
        if peer is None:
            return list(self._transports)
        with self._lock:
            ranked = self._ranked.get(peer, ())
            now = self._clock()
            shunned = {name for name in self._transports if self._shunned_until_s.get((peer, name), 0.0) > now}
        names = [*ranked, *(name for name in self._transports if name not in ranked)]
        return sorted(names, key=lambda name: name in shunned)

    def _offer(self, name: str, blocks: KVBlocks, lease_s: float) -> KVTicket:
        ticket = self._transports[name].offer(blocks, lease_s)
        with self._lock:
            self._transport_of_offer[ticket.id] = name
        return ticket

    def _time_probe(self, ticket: KVTicket) -> float:
        into = self._probe_memory(ticket.blocks)
        began_s = time.perf_counter()
        self._transports[ticket.transport].fetch(ticket, into, PROBE_LEASE_S)
        return time.perf_counter() - began_s

    def _probe_memory(self, blocks: int | None = None) -> KVBlocks:
        """Memory of its own, so that probing disturbs no cache."""
        with self._lock:
            if self._probe is None:
                count = max(1, min(MAX_PROBE_BLOCKS, PROBE_BYTES // self.kv.block_bytes))
                shape = count, self.kv.layer_block_bytes
                self._probe = KVBlocks.of([np.zeros(shape, np.uint8) for _ in range(self.kv.num_layers)])
                self.register(self._probe.rows)
            return self._probe if blocks is None else self._probe.part(0, blocks)
