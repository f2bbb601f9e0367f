"""Network cards and storage channels, and the bytes that flow through them.

A flow crosses a few links (the sender's outgoing side, the receiver's incoming side, perhaps a storage channel) and runs at
the least of their fair shares: capacity over the number of flows on the link. Capacity that a flow cannot use because of
its other link stays unused. Without contention every flow runs at full speed, which is how Dynamo's mock engine counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from traces.sim.loop import At, EventLoop


class Link:
    """One direction of a network card, or a storage channel."""

    __slots__ = ("bytes_moved", "bytes_per_s", "flows", "name")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.bytes_moved = 0
        self.flows: dict[Flow, None] = {}

    @property
    def left_bytes(self) -> float:
        """What the flows on the link had left to send when their speeds last changed."""
        return sum(flow.left_bytes for flow in self.flows)


class Flow:
    """Bytes on their way. `version` grows with every change of speed and outdates the ending planned before."""

    __slots__ = ("arrived", "left_bytes", "links", "path", "rate", "size_bytes", "started_s", "updated_s", "version")

    def __init__(self, path: str, links: Sequence[Link], size_bytes: int, arrived: Callable[[], None], now: float) -> None:
        self.path = path
        self.links = links
        self.size_bytes = size_bytes
        self.left_bytes = float(size_bytes)
        self.rate = 0.0
        self.started_s = now
        self.updated_s = now
        self.version = 0
        self.arrived = arrived


class Network:
    """Starts flows and calls back when they have arrived. `bytes_moved` counts them by path."""

    def __init__(self, loop: EventLoop, *, latency_s: float, contention: bool) -> None:
        self._loop = loop
        self._latency_s = latency_s
        self._contention = contention
        self.bytes_moved: Counter[str] = Counter()

    def start(self, path: str, links: Sequence[Link], size_bytes: int, arrived: Callable[..., None], *args: Any) -> Flow:
        """Send `size_bytes` over `links`; `arrived(*args)` is called when the last byte is there."""
        now = self._loop.now
        flow = Flow(path, links, size_bytes, partial(arrived, *args), now)
        if self._contention:
            self._loop.at(now + self._latency_s, At.COMPLETION, self._enter, flow, 0)
        else:
            rate = min(link.bytes_per_s for link in links)
            self._loop.at(now + self._latency_s + size_bytes / rate, At.COMPLETION, self._arrive, flow, 0)
        return flow

    def stop(self, flow: Flow) -> None:
        """Break a flow off: its callback will not be called. Bytes already sent stay counted."""
        flow.version += 1
        sent = flow.rate * (self._loop.now - flow.updated_s)
        self._count(flow, flow.size_bytes - max(0, round(flow.left_bytes - sent)))
        self._leave(flow)

    def _enter(self, flow: Flow, version: int) -> None:
        if version != flow.version:
            return
        flow.updated_s = self._loop.now
        for link in flow.links:
            link.flows[flow] = None
        self._share(flow.links)

    def _leave(self, flow: Flow) -> None:
        if not self._contention:
            return
        for link in flow.links:
            link.flows.pop(flow, None)
        self._share(flow.links)

    def _count(self, flow: Flow, sent_bytes: int) -> None:
        self.bytes_moved[flow.path] += sent_bytes
        for link in flow.links:
            link.bytes_moved += sent_bytes

    def _share(self, links: Sequence[Link]) -> None:
        """Give every flow on `links` its share from this moment on."""
        for flow in dict.fromkeys(flow for link in links for flow in link.flows):
            rate = min(link.bytes_per_s / len(link.flows) for link in flow.links)
            if rate != flow.rate:
                self._replan(flow, rate)

    def _replan(self, flow: Flow, rate: float) -> None:
        now = self._loop.now
        flow.left_bytes = max(0.0, flow.left_bytes - flow.rate * (now - flow.updated_s))
        flow.rate, flow.updated_s = rate, now
        flow.version += 1
        self._loop.at(now + flow.left_bytes / rate, At.COMPLETION, self._arrive, flow, flow.version)

    def _arrive(self, flow: Flow, version: int) -> None:
        if version != flow.version:
            return
        self._count(flow, flow.size_bytes)
        self._leave(flow)
        flow.arrived()
