"""Which blocks of a tier go first. Pure: it reads no clock and deletes nothing.

Reclaim begins when a tier fills beyond its high watermark and ends at the low one. What is least recently used goes first,
where a block's age counts from its last use plus the retention target of its traffic class: a target orders eviction and is
never a timer, so an expired block stays as long as there is room, and a young one goes when there is none. Leaves go before
their roots, so a tier stays closed: what it holds, it holds from the first block on. Pinned blocks and their ancestors stay.
(DeepSeek keeps its on-disk KV for days, without a timer, under a watermark.)
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from conductor.core.types import BlockHash

DAY_S = 86_400.0
DEFAULT_TARGETS_S = {"agent": 3 * DAY_S, "chat": 7 * DAY_S}


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Watermarks are shares of a tier's capacity. A class without a target of its own has `default_target_s`."""

    high_watermark: float = 0.95
    low_watermark: float = 0.85
    targets_s: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_TARGETS_S))
    default_target_s: float = 7 * DAY_S

    def __post_init__(self) -> None:
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            found = f"low_watermark is {self.low_watermark!r} and high_watermark is {self.high_watermark!r}"
            raise ValueError(f"{found}; they must satisfy 0 < low_watermark <= high_watermark <= 1")
        for name, target_s in {**self.targets_s, "default_target_s": self.default_target_s}.items():
            if not target_s >= 0:
                raise ValueError(f"the retention target of {name!r} is {target_s!r} s; it must be at least 0")

    def due_s(self, last_used_s: float, traffic_class: str) -> float:
        """When the block's retention target is reached; blocks that are due earlier go earlier."""
        return last_used_s + self.targets_s.get(traffic_class, self.default_target_s)

    def to_evict(self, used: int, incoming: int, capacity: int) -> int:
        """How much must go before `incoming` can be taken; 0 while the high watermark is not passed."""
        if used + incoming <= self.high_watermark * capacity:
            return 0
        return min(used, max(0, used + incoming - int(self.low_watermark * capacity)))


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """One held block as an eviction plan sees it."""

    name: BlockHash
    parent: BlockHash | None
    last_used_s: float
    traffic_class: str
    pinned: bool = False


def plan_eviction(held: Collection[HeldBlock], count: int, policy: RetentionPolicy) -> list[BlockHash]:
    """Up to `count` blocks in the order in which they go. O(blocks)."""
    known = {block.name: block for block in held}
    children: dict[BlockHash, int] = {}
    for block in held:
        if block.parent is not None:
            children[block.parent] = children.get(block.parent, 0) + 1
    leaves = [(_due(block, policy), block.name) for block in held if not children.get(block.name) and not block.pinned]
    heapq.heapify(leaves)
    going: list[BlockHash] = []
    while leaves and len(going) < count:
        block = known[heapq.heappop(leaves)[1]]
        going.append(block.name)
        parent = known.get(block.parent) if block.parent is not None else None
        if parent is None:
            continue
        children[parent.name] -= 1
        if not children[parent.name] and not parent.pinned:
            heapq.heappush(leaves, (_due(parent, policy), parent.name))
    return going


def with_descendants(held: Iterable[tuple[BlockHash, BlockHash | None]], roots: Iterable[BlockHash]) -> list[BlockHash]:
    """Held blocks among `roots` and everything that follows them, what follows before what it follows."""
    children: dict[BlockHash, list[BlockHash]] = {}
    names = set()
    for name, parent in held:
        names.add(name)
        if parent is not None:
            children.setdefault(parent, []).append(name)
    chosen: dict[BlockHash, None] = {}
    pending = [name for name in roots if name in names]
    while pending:
        name = pending.pop()
        if name not in chosen:
            chosen[name] = None
            pending.extend(children.get(name, ()))
    return _leaves_first(chosen, children)


def _leaves_first(chosen: Collection[BlockHash], children: Mapping[BlockHash, list[BlockHash]]) -> list[BlockHash]:
    order: list[BlockHash] = []
    below = {child for name in chosen for child in children.get(name, ())}
    pending = [name for name in chosen if name not in below]
    while pending:
        name = pending.pop()
        order.append(name)
        pending.extend(children.get(name, ()))
    return order[::-1]


def _due(block: HeldBlock, policy: RetentionPolicy) -> float:
    return policy.due_s(block.last_used_s, block.traffic_class)
