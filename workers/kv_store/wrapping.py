"""A tier around another one, which keeps something else of a block than what is put: what is kept, a subclass says."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from conductor.core.types import BlockHash
from workers.kv_store.base import BlockFormat, KVTier, NewBlock, TierChange, TierStats
from workers.kv_store.retention import HeldBlock
from workers.kv_transfer.base import KVArray


class WrappingTier(KVTier):
    """Takes and gives rows of `block_format`; `inner` must have been opened for what `_packed` makes of them."""

    def __init__(self, inner: KVTier, block_format: BlockFormat) -> None:
        super().__init__(block_format)
        self.tier, self.bare = inner.tier, inner.bare
        self.counters, self.changes = inner.counters, inner.changes
        self._inner = inner

    @abstractmethod
    def _packed(self, row: KVArray) -> KVArray:
        """What is kept of a block."""

    @abstractmethod
    def _unpacked(self, row: KVArray) -> KVArray:
        """The block that was kept so."""

    @property
    def capacity_blocks(self) -> int:
        return self._inner.capacity_blocks

    def match(self, blocks: Sequence[BlockHash]) -> int:
        return self._inner.match(blocks)

    def put(self, blocks: Sequence[NewBlock]) -> int:
        return self._inner.put([replace(block, data=self._packed(block.data)) for block in blocks])

    def expect(self, blocks: Sequence[BlockHash]) -> None:
        self._inner.expect(blocks)

    @contextmanager
    def read(self, blocks: Sequence[BlockHash]) -> Iterator[list[KVArray]]:
        with self._inner.read(blocks) as rows:
            yield [self._unpacked(row) for row in rows]

    def remove(self, blocks: Iterable[BlockHash]) -> int:
        return self._inner.remove(blocks)

    def pin(self, blocks: Sequence[BlockHash]) -> int:
        return self._inner.pin(blocks)

    def unpin(self, blocks: Sequence[BlockHash]) -> None:
        self._inner.unpin(blocks)

    def snapshot(self) -> tuple[BlockHash, ...]:
        return self._inner.snapshot()

    def look(self) -> list[TierChange]:
        return self._inner.look()

    def drain_changes(self) -> list[TierChange]:
        return self._inner.drain_changes()

    def held(self) -> list[HeldBlock]:
        return self._inner.held()

    def stats(self) -> TierStats:
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()
