"""Tokens on their way to gateways: one bounded queue a channel, kept until its consumer takes them.

A channel has one consumer. A second one takes over: the first ends, and the batch that it took last is handed out again,
because nobody knows whether it arrived; the receiver drops repeated indexes. For one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from conductor.core.messages import TokenOutput


@dataclass(slots=True)
class _Channel:
    unread: deque[TokenOutput] = field(default_factory=deque)
    taken: list[TokenOutput] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    consumer: int = 0


class OutputChannels:
    def __init__(self, max_unread: int) -> None:
        self._max_unread = max_unread
        self._channels: dict[str, _Channel] = {}

    @property
    def unread(self) -> int:
        return sum(len(channel.unread) for channel in self._channels.values())

    def put(self, name: str, output: TokenOutput) -> bool:
        """Queue an output; False when the channel is full because nobody reads it."""
        channel = self._channels.setdefault(name, _Channel())
        if len(channel.unread) >= self._max_unread:
            return False
        channel.unread.append(output)
        channel.wake.set()
        return True

    async def stream(self, name: str) -> AsyncIterator[list[TokenOutput]]:
        """Everything queued so far, again and again, until another consumer takes over."""
        channel = self._channels.setdefault(name, _Channel())
        channel.consumer += 1
        me = channel.consumer
        channel.unread.extendleft(reversed(channel.taken))
        channel.taken = []
        channel.wake.set()
        while True:
            await channel.wake.wait()
            if channel.consumer != me:
                return
            channel.wake.clear()
            if channel.unread:
                channel.taken = list(channel.unread)
                channel.unread.clear()
                yield channel.taken
                if channel.consumer != me:
                    return
                channel.taken = []
                if channel.unread:
                    channel.wake.set()
