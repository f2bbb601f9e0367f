"""A small stand-in for the prefix index: same interface, sets instead of bitmasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from conductor.core.types import BlockHash, Holder

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    depths: IntArray
    confirmed: IntArray


class PrefixIndex:
    def __init__(self) -> None:
        self._slots: dict[Holder, int] = {}
        self._held: dict[Holder, set[BlockHash]] = {}
        self._expected: dict[Holder, dict[BlockHash, float]] = {}

    def add(self, holder: Holder) -> int:
        if holder not in self._slots:
            used = set(self._slots.values())
            self._slots[holder] = next(i for i in range(len(used) + 1) if i not in used)
            self._held[holder] = set()
            self._expected[holder] = {}
        return self._slots[holder]

    def slot(self, holder: Holder) -> int:
        return self._slots[holder]

    def discard(self, holder: Holder) -> None:
        self._slots.pop(holder, None)
        self._held.pop(holder, None)
        self._expected.pop(holder, None)

    def store(self, holder: Holder, parent: BlockHash | None, blocks: Sequence[BlockHash]) -> bool:
        self.add(holder)
        if parent is not None and parent not in self._held[holder]:
            return False
        self._held[holder].update(blocks)
        self.unexpect(holder, blocks)
        return True

    def remove(self, holder: Holder, blocks: Iterable[BlockHash]) -> None:
        if holder in self._held:
            self._held[holder].difference_update(blocks)

    def clear(self, holder: Holder) -> None:
        if holder in self._held:
            self._held[holder] = set()
            self._expected[holder] = {}

    def replace(self, holder: Holder, blocks: Iterable[BlockHash]) -> None:
        self.add(holder)
        self._held[holder] = set(blocks)

    def expect(self, holder: Holder, blocks: Sequence[BlockHash], until_s: float) -> None:
        for block in blocks:
            if block not in self._held[holder]:
                self._expected[holder][block] = until_s

    def unexpect(self, holder: Holder, blocks: Iterable[BlockHash]) -> None:
        for block in blocks:
            self._expected.get(holder, {}).pop(block, None)

    def expire(self, now: float) -> None:
        for expected in self._expected.values():
            for block in [block for block, until in expected.items() if until < now]:
                del expected[block]

    def holders(self, block: BlockHash) -> tuple[Holder, ...]:
        return tuple(sorted((h for h, held in self._held.items() if block in held), key=lambda h: (h.tier, h.owner)))

    def match(self, block_hashes: Sequence[BlockHash]) -> PrefixMatch:
        size = max(self._slots.values(), default=-1) + 1
        depths, confirmed = np.zeros(size, np.int32), np.zeros(size, np.int32)
        for holder, slot in self._slots.items():
            held, expected = self._held[holder], self._expected[holder]
            depths[slot] = _leading(block_hashes, lambda b, h=held, e=expected: b in h or b in e)
            confirmed[slot] = _leading(block_hashes, held.__contains__)
        return PrefixMatch(depths, confirmed)

    def check(self) -> None:
        assert set(self._slots) == set(self._held) == set(self._expected)


def _leading(blocks: Sequence[BlockHash], holds) -> int:  # type: ignore[no-untyped-def]
    for depth, block in enumerate(blocks):
        if not holds(block):
            return depth
    return len(blocks)
