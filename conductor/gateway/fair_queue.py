"""Who of many waiting flows is next: deficit round robin (Shreedhar and Varghese, SIGCOMM 1995).

Every flow has a first-in-first-out queue of items with costs, and a weight. In each round a flow earns `quantum` times its
weight and may spend what it has earned; a flow that has nothing to send keeps no savings. Over any time in which two flows
both wait, what they are served differs from the ratio of their weights by a bounded amount, whatever their items cost, and no
item waits for ever. Pure: no clock, no randomness; flows are visited in the order in which they began to wait.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(slots=True)
class _Flow(Generic[Item]):
    weight: float
    queue: deque[tuple[Item, float]] = field(default_factory=deque)
    deficit: float = 0.0
    earned: bool = False  # in the round that is going on

    @property
    def missing(self) -> float:
        """What the flow still has to earn for its first item."""
        return self.queue[0][1] - self.deficit


class FairQueue(Generic[Item]):
    """Mutable. `pop` costs O(flows) at worst, however large the items are."""

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum
        self._flows: dict[str, _Flow[Item]] = {}
        self._round: deque[str] = deque()

    def __len__(self) -> int:
        return sum(len(flow.queue) for flow in self._flows.values())

    def __bool__(self) -> bool:
        return bool(self._round)

    def waiting(self, name: str) -> int:
        """Items of one flow."""
        flow = self._flows.get(name)
        return len(flow.queue) if flow else 0

    def push(self, name: str, item: Item, *, cost: float, weight: float = 1.0) -> None:
        """Append to a flow; the flow's weight is the last one given."""
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = _Flow(weight)
            self._round.append(name)
        flow.weight = weight
        flow.queue.append((item, cost))

    def pop(self) -> Item:
        """The item that is next; raises `IndexError` when nothing waits."""
        if not self._round:
            raise IndexError("nothing waits")
        self._skip_empty_rounds()
        while True:
            name = self._round[0]
            flow = self._flows[name]
            if not flow.earned:
                flow.deficit += self._quantum * flow.weight
                flow.earned = True
            if flow.missing <= 0:
                return self._serve(name, flow)
            self._next_flow(flow)

    def remove(self, name: str, item: Item) -> bool:
        """Take out an item that waits no longer; False if it was not there."""
        flow = self._flows.get(name)
        for index, (waiting, _) in enumerate(flow.queue if flow else ()):
            if waiting is item and flow is not None:
                del flow.queue[index]
                self._forget_if_empty(name, flow)
                return True
        return False

    def _serve(self, name: str, flow: _Flow[Item]) -> Item:
        item, cost = flow.queue.popleft()
        flow.deficit -= cost
        self._forget_if_empty(name, flow)
        return item

    def _forget_if_empty(self, name: str, flow: _Flow[Item]) -> None:
        if not flow.queue:
            del self._flows[name]
            self._round.remove(name)

    def _next_flow(self, flow: _Flow[Item]) -> None:
        flow.earned = False
        self._round.rotate(-1)

    def _skip_empty_rounds(self) -> None:
        """Grant at once all rounds in which no flow could send anything."""
        flows = self._flows.values()
        rounds = min(math.ceil(flow.missing / (self._quantum * flow.weight)) for flow in flows)
        for flow in flows:
            flow.deficit += max(0, rounds - 2) * self._quantum * flow.weight
