"""A queue to one consumer that hands over everything it holds at once, so that a slow consumer costs one wake-up, not many."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Unbounded; for one event loop; one consumer of `batches`."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        self._items.append(item)
        self._wake.set()

    def close(self) -> None:
        """Let the consumer end after what is held."""
        self._closed = True
        self._wake.set()

    def take_over(self, other: Mailbox[T], keep: Callable[[T], bool]) -> None:
        """Append what `other` still holds, as far as `keep` says, and end `other`'s consumer."""
        for item in other._items:
            if keep(item):
                self.put(item)
        other._items.clear()
        other.close()

    async def batches(self) -> AsyncIterator[list[T]]:
        """Everything put so far, again and again, until closed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch = list(self._items)
            self._items.clear()
            if batch:
                yield batch
            elif self._closed:
                return
            if self._closed:
                self._wake.set()
