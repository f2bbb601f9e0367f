"""Prefixes that slots are going to have: dispatched to them, not yet reported.

Only what is in flight is kept, as a radix tree of whole chains from the root: a node is a run of blocks that the same chains
share. Since a block hash names its whole prefix, two chains agree up to some depth and nowhere after it, so the common part
of a prompt and a node is found by bisection, and a chain of thousands of blocks costs no more than a short one. A chain stands
until it is confirmed, given up or expired (I11).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from conductor.core.types import BlockHash, InvariantError


@dataclass(slots=True)
class _Chain:
    """What one slot expects once or several times over."""

    blocks: tuple[BlockHash, ...]
    until_s: float
    count: int = 1


@dataclass(slots=True, eq=False)
class _Node:
    """Blocks `start..stop` of `blocks`, and how many chains of each slot run through them."""

    blocks: tuple[BlockHash, ...]
    start: int
    stop: int
    slots: dict[int, int]
    children: dict[BlockHash, _Node] = field(default_factory=dict)

    def common(self, hashes: Sequence[BlockHash]) -> int:
        """The depth up to which `hashes`, which has the first block of this node, agrees with it."""
        low, high = self.start + 1, min(self.stop, len(hashes))
        if low <= high and self.blocks[high - 1] == hashes[high - 1]:
            return high
        while low < high:
            middle = (low + high) // 2
            if self.blocks[middle] == hashes[middle]:
                low = middle + 1
            else:
                high = middle
        return low


class ExpectedPrefixes:
    def __init__(self) -> None:
        self._roots: dict[BlockHash, _Node] = {}
        self._chains: dict[int, dict[BlockHash, _Chain]] = {}
        self._due_s = math.inf  # no chain expires before

    def __bool__(self) -> bool:
        return bool(self._roots)

    def add(self, slot: int, blocks: Sequence[BlockHash], until_s: float) -> None:
        """Expect the chain `blocks`, from its root on, at a slot."""
        self._due_s = min(self._due_s, until_s)
        chains = self._chains.setdefault(slot, {})
        chain = chains.get(blocks[-1])
        if chain is not None:
            chain.count += 1
            chain.until_s = max(chain.until_s, until_s)
            return
        chain = chains[blocks[-1]] = _Chain(tuple(blocks), until_s)
        self._insert(slot, chain.blocks)

    def discard(self, slot: int, last: BlockHash) -> None:
        """One of those who would have stored the chain that ends in `last` does not."""
        chain = self._chains.get(slot, {}).get(last)
        if chain is None:
            return
        chain.count -= 1
        if chain.count == 0:
            self.confirm(slot, last)

    def confirm(self, slot: int, last: BlockHash) -> None:
        """The chain that ends in `last` need not be expected any more."""
        chain = self._chains[slot].pop(last)
        if not self._chains[slot]:
            del self._chains[slot]
        for node in list(self._path(chain.blocks)):
            node.slots[slot] -= 1
            if node.slots[slot] == 0:
                del node.slots[slot]
        self._prune(chain.blocks)

    def ends(self, slot: int) -> dict[BlockHash, _Chain] | None:
        """The chains of a slot by their last block; None when it expects nothing."""
        return self._chains.get(slot)

    def forget(self, slot: int) -> None:
        """The slot expects nothing any more."""
        for last in list(self._chains.get(slot, ())):
            self.confirm(slot, last)

    def expire(self, now: float) -> int:
        """Drop the chains whose time has passed; how many. Costs nothing until one's may have."""
        if now <= self._due_s:
            return 0
        expired = [
            (slot, last) for slot, chains in self._chains.items() for last, chain in chains.items() if chain.until_s < now
        ]
        for slot, last in expired:
            self.confirm(slot, last)
        self._due_s = min((c.until_s for chains in self._chains.values() for c in chains.values()), default=math.inf)
        return len(expired)

    def depths(self, hashes: Sequence[BlockHash]) -> Iterator[tuple[Collection[int], int]]:
        """(slots, depth) of all that expect a prefix of `hashes`, in order of depth."""
        depth, node = 0, self._roots.get(hashes[0]) if hashes else None
        while node is not None:
            depth = node.common(hashes)
            yield node.slots, depth
            whole = depth == node.stop and depth < len(hashes)
            node = node.children.get(hashes[depth]) if whole else None

    def check(self) -> None:
        """Raise `InvariantError` if the tree is not exactly that of the chains."""
        rebuilt = ExpectedPrefixes()
        for slot, chains in self._chains.items():
            for chain in chains.values():
                rebuilt._insert(slot, chain.blocks)
        if _content(rebuilt._roots) != _content(self._roots):
            raise InvariantError("I11: expected prefixes differ from the chains that they come from")

    def _insert(self, slot: int, blocks: tuple[BlockHash, ...]) -> None:
        siblings, depth = self._roots, 0
        while depth < len(blocks):
            node = siblings.get(blocks[depth])
            if node is None:
                siblings[blocks[depth]] = _Node(blocks, depth, len(blocks), {slot: 1})
                return
            depth = node.common(blocks)
            if depth < node.stop:
                self._split(node, depth)
            node.slots[slot] = node.slots.get(slot, 0) + 1
            siblings = node.children

    def _split(self, node: _Node, depth: int) -> None:
        """End a node at `depth` and hang the rest of it below."""
        rest = _Node(node.blocks, depth, node.stop, dict(node.slots), node.children)
        node.stop, node.children = depth, {node.blocks[depth]: rest}

    def _path(self, blocks: tuple[BlockHash, ...]) -> Iterator[_Node]:
        siblings, depth = self._roots, 0
        while depth < len(blocks):
            node = siblings[blocks[depth]]
            yield node
            siblings, depth = node.children, node.stop

    def _prune(self, blocks: tuple[BlockHash, ...]) -> None:
        """Drop the first node on the way that no chain runs through any more, with all that is below it."""
        siblings, depth = self._roots, 0
        while depth < len(blocks):
            node = siblings[blocks[depth]]
            if not node.slots:
                del siblings[blocks[depth]]
                return
            siblings, depth = node.children, node.stop


def _content(siblings: dict[BlockHash, _Node]) -> dict[tuple[BlockHash, ...], dict[int, int]]:
    """Chains of every block of a tree with its counts, whatever the runs that the blocks are cut into."""
    content: dict[tuple[BlockHash, ...], dict[int, int]] = {}
    pending = list(siblings.values())
    while pending:
        node = pending.pop()
        for depth in range(node.start, node.stop):
            content[node.blocks[: depth + 1]] = node.slots
        pending += node.children.values()
    return content
