"""Actors without Ray: a handle whose calls run on the event loop of the caller, and that can die as a process does.

`handle.method.remote(...)` is awaited for a coroutine and iterated for a stream, whose items are awaited, as with Ray. After
`kill` every call and every stream fails, the running ones included, and so do the actor's own tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from inspect import isasyncgenfunction
from typing import Any


class ActorGoneError(Exception):
    """The actor's process has ended."""


class LocalHandle:
    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self._calls: set[asyncio.Future[Any]] = set()
        self._dead = False

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)

    def kill(self) -> None:
        self._dead = True
        for call in list(self._calls):
            call.cancel()

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._dead:
            work.close()
            raise ActorGoneError
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._dead and task.cancelled():
                raise ActorGoneError from None
            raise
        finally:
            self._calls.discard(task)

    async def stream(self, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
        while True:
            try:
                item = await self.run(anext(items))  # type: ignore[arg-type]
            except StopAsyncIteration:
                return
            yield _value(item)


class _Method:
    def __init__(self, handle: LocalHandle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *args: Any) -> Any:
        method = getattr(self._handle.actor, self._name)
        if isasyncgenfunction(method):
            return self._handle.stream(method(*args))
        return self._handle.run(method(*args))


async def _value(item: Any) -> Any:
    return item
