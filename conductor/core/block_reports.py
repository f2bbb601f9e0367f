"""From what workers report of their caches to what the prefix index claims.

Every report carries its source, the source's life (epoch) and a sequence number without gaps. A repeated or older stamp changes
nothing; a new epoch forgets everything the old one claimed; a gap asks for a snapshot, and until that comes only removals are
believed, since a removal never makes a claim false, and the index trusts no closure, since a removal may have been lost.
Reports of a source that has not joined, or is known to be dead, are ignored: nobody could fetch from it, and nobody would say
when its claims end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from conductor.core.cluster_view import ClusterView
from conductor.core.commands import Command, RequestSnapshot
from conductor.core.events import BlocksRemoved, BlocksStored, CacheCleared, IndexSnapshot
from conductor.core.prefix_index import PrefixIndex
from conductor.core.types import Holder, InvariantError, Stamp, Tier

MAX_REMEMBERED_DEATHS = 4096


@dataclass(slots=True)
class SourceLog:
    """How far one source has been followed. `asked_s` is when a snapshot was last asked for, while one is awaited."""

    epoch: int
    seq: int = 0
    highest_seq: int = 0
    asked_s: float | None = None
    holders: dict[Holder, None] = field(default_factory=dict)


class BlockReports:
    def __init__(self, index: PrefixIndex, view: ClusterView, snapshot_retry_s: float) -> None:
        self._index = index
        self._view = view
        self._snapshot_retry_s = snapshot_retry_s
        self._logs: dict[str, SourceLog] = {}
        self._dead: dict[str, int] = {}
        self._asked: dict[str, None] = {}  # sources that owe a snapshot

    def joined(self, source: str, epoch: int) -> bool:
        """A source that is not followed starts a life; False when that life is already over."""
        if epoch <= self._dead.get(source, -1):
            return False
        self._restart(source, epoch)
        return True

    def lost(self, source: str, epoch: int) -> None:
        """Forget everything that a source claimed, and never listen to that life again."""
        self._forget(source)
        self._logs.pop(source, None)
        self._asked.pop(source, None)
        self._dead[source] = max(epoch, self._dead.pop(source, epoch))
        if len(self._dead) > MAX_REMEMBERED_DEATHS:
            del self._dead[next(iter(self._dead))]

    def stored(self, event: BlocksStored, now: float) -> list[Command]:
        log, commands = self._follow(event.stamp, now)
        if log is None:
            return commands
        holder = self._holder(event.stamp.source, event.tier, log)
        if self._index.store(holder, event.parent, event.blocks):
            return commands
        return self._ask(event.stamp.source, log, now)

    def removed(self, event: BlocksRemoved, now: float) -> list[Command]:
        log, commands = self._follow(event.stamp, now)
        log = log or self._uncertain(event.stamp)
        if log is not None:
            self._index.remove(self._holder(event.stamp.source, event.tier, log), event.blocks)
        return commands

    def cleared(self, event: CacheCleared, now: float) -> list[Command]:
        log, commands = self._follow(event.stamp, now)
        log = log or self._uncertain(event.stamp)
        if log is not None:
            self._index.clear(self._holder(event.stamp.source, event.tier, log))
        return commands

    def snapshot(self, event: IndexSnapshot, now: float) -> list[Command]:
        stamp = event.stamp
        log = self._living(stamp)
        if log is None or (stamp.seq <= log.seq and log.asked_s is None and log.seq > 0):
            return []
        fresh = {self._holder(stamp.source, tier, log): blocks for tier, blocks in event.blocks.items()}
        for holder in log.holders:
            self._index.replace(holder, fresh.get(holder, ()))
        log.seq, log.asked_s = stamp.seq, None
        self._asked.pop(stamp.source, None)
        if log.highest_seq > stamp.seq:
            return self._ask(stamp.source, log, now)
        log.highest_seq = stamp.seq
        return []

    def ask(self, source: str, now: float) -> list[Command]:
        """Ask for a snapshot of a source whose claims proved wrong, unless one is on its way."""
        log = self._logs.get(source)
        return [] if log is None or log.asked_s is not None else self._ask(source, log, now)

    def ask_again(self, now: float) -> list[Command]:
        """Repeat requests that stayed without an answer."""
        if not self._asked:
            return []
        return [
            command
            for source, log in self._logs.items()
            if log.asked_s is not None and now >= log.asked_s + self._snapshot_retry_s
            for command in self._ask(source, log, now)
        ]

    def next_deadline(self) -> float:
        if not self._asked:
            return math.inf
        asked = [log.asked_s for log in self._logs.values() if log.asked_s is not None]
        return min(asked) + self._snapshot_retry_s

    def check(self) -> None:
        asked = {source for source, log in self._logs.items() if log.asked_s is not None}
        if asked != set(self._asked):
            raise InvariantError(f"snapshots are owed by {sorted(asked)}, and counted for {sorted(self._asked)}")
        for source, log in self._logs.items():
            if log.seq > log.highest_seq:
                raise InvariantError(
                    f"{source}: followed to {log.seq}, beyond the highest sequence {log.highest_seq} ever seen"
                )
            if log.epoch <= self._dead.get(source, -1):
                raise InvariantError(f"I8: {source} is followed in epoch {log.epoch}, which is over")

    def _follow(self, stamp: Stamp, now: float) -> tuple[SourceLog | None, list[Command]]:
        """The log to apply an event to, or None when it must not be applied; and what to ask for."""
        log = self._living(stamp)
        if log is None or stamp.seq <= log.seq:
            return None, []
        log.highest_seq = max(log.highest_seq, stamp.seq)
        if log.asked_s is not None:
            return None, []
        if stamp.seq > log.seq + 1:
            return None, self._ask(stamp.source, log, now)
        log.seq = stamp.seq
        return log, []

    def _living(self, stamp: Stamp) -> SourceLog | None:
        """The log of the life that speaks, begun here if it is a later one; None if it is over or nobody has joined."""
        log = self._logs.get(stamp.source)
        if log is None or stamp.epoch < log.epoch:
            return None
        return log if stamp.epoch == log.epoch else self._restart(stamp.source, stamp.epoch)

    def _uncertain(self, stamp: Stamp) -> SourceLog | None:
        """The log of a source that awaits its snapshot, for events that can only take claims away."""
        log = self._logs.get(stamp.source)
        return log if log is not None and log.asked_s is not None and stamp.epoch == log.epoch and stamp.seq > log.seq else None

    def _ask(self, source: str, log: SourceLog, now: float) -> list[Command]:
        log.asked_s = now
        self._asked[source] = None
        for holder in log.holders:
            self._index.doubt(holder)
        return [RequestSnapshot(source, log.epoch)]

    def _holder(self, source: str, tier: Tier, log: SourceLog) -> Holder:
        holder = self._view.holder(source, tier)
        log.holders[holder] = None
        self._view.know_holder(holder)
        return holder

    def _restart(self, source: str, epoch: int) -> SourceLog:
        self._forget(source)
        log = self._logs[source] = SourceLog(epoch)
        self._asked.pop(source, None)
        return log

    def _forget(self, source: str) -> None:
        log = self._logs.get(source)
        holders: Iterable[Holder] = () if log is None else log.holders
        for holder in holders:
            self._index.clear(holder)
