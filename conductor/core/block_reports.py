"""From what workers report of their caches to what the prefix index claims.

Every report carries its source, the source's life (epoch) and a sequence number without gaps. A repeated or older stamp changes
nothing; a new epoch forgets everything the old one claimed; a gap asks for a snapshot, and until that comes only removals are
believed, since a removal never makes a claim false, and the index trusts no closure, since a removal may have been lost.
Reports of a source that has not joined, or is known to be dead, are ignored: nobody could fetch from it, and nobody would say
when its claims end.

A large snapshot is taken in by pieces, one a tick, so that no decision waits for the whole of it. Until it is in, its source's
claims are too few rather than wrong, and what the source tells meanwhile waits behind it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from conductor.core.cluster_view import ClusterView
from conductor.core.commands import Command, RequestSnapshot
from conductor.core.events import BlocksRemoved, BlocksStored, CacheCleared, IndexSnapshot
from conductor.core.prefix_index import PrefixIndex
from conductor.core.types import BlockHash, Holder, InvariantError, Stamp, Tier

MAX_REMEMBERED_DEATHS = 4096
PIECE_PAUSE_S = 1e-4  # between two pieces of a snapshot, for whatever else is due

CacheChange: TypeAlias = BlocksStored | BlocksRemoved | CacheCleared


@dataclass(slots=True)
class Intake:
    """A snapshot that is being taken in, and what its source has told since."""

    pieces: deque[tuple[Holder, tuple[BlockHash, ...]]]
    later: list[CacheChange] = field(default_factory=list)


@dataclass(slots=True)
class SourceLog:
    """How far one source has been followed. `asked_s` is when a snapshot was last asked for, while one is awaited; `intake` is
    set while one is taken in, and `known` once one has been."""

    epoch: int
    seq: int = 0
    highest_seq: int = 0
    asked_s: float | None = None
    holders: dict[Holder, None] = field(default_factory=dict)
    intake: Intake | None = None
    known: bool = False


class BlockReports:
    def __init__(self, index: PrefixIndex, view: ClusterView, snapshot_retry_s: float, piece_blocks: int) -> None:
        self._index = index
        self._view = view
        self._snapshot_retry_s = snapshot_retry_s
        self._piece_blocks = piece_blocks
        self._intakes: dict[str, None] = {}  # sources whose snapshots are being taken in
        self._piece_due_s = math.inf
        self._logs: dict[str, SourceLog] = {}
        self._dead: dict[str, int] = {}
        self._asked: dict[str, None] = {}  # sources that owe a snapshot

    def joined(self, source: str, epoch: int) -> bool:
        """A source that is not followed starts a life; False when that life is already over."""
        if epoch <= self._dead.get(source, -1):
            return False
        self._restart(source, epoch)
        return True

    def lost(self, source: str, epoch: int, now: float) -> list[Command]:
        """Forget everything that a source claimed, and never listen to that life again. What it had yet to tell of tiers that
        others report on as well, one of these others is asked for: each tells what differs from what it has told itself."""
        self._forget(source)
        log = self._logs.pop(source, None)
        self._dead[source] = max(epoch, self._dead.pop(source, epoch))
        if len(self._dead) > MAX_REMEMBERED_DEATHS:
            del self._dead[next(iter(self._dead))]
        commands: list[Command] = []
        for holder in () if log is None else log.holders:
            other = next((name for name, known in self._logs.items() if holder in known.holders), None)
            commands += [] if other is None else self.ask(other, now)
        return commands

    def stored(self, event: BlocksStored, now: float) -> list[Command]:
        log, commands = self._follow(event.stamp, now)
        if log is None or self._apply(event, log):
            return commands
        return self._ask(event.stamp.source, log, now)

    def removed(self, event: BlocksRemoved, now: float) -> list[Command]:
        log, commands = self._follow(event.stamp, now)
        log = log or self._uncertain(event.stamp)
        if log is not None:
            self._apply(event, log)
        return commands

    def cleared(self, event: CacheCleared, now: float) -> list[Command]:
        log, commands = self._follow(event.stamp, now)
        log = log or self._uncertain(event.stamp)
        if log is not None:
            self._apply(event, log)
        return commands

    def snapshot(self, event: IndexSnapshot, now: float) -> list[Command]:
        stamp = event.stamp
        log = self._living(stamp)
        if log is None or (stamp.seq <= log.seq and log.asked_s is None and log.seq > 0):
            return []
        log.seq, log.asked_s = stamp.seq, None
        self._asked.pop(stamp.source, None)
        fresh = {self._holder(stamp.source, tier, log): blocks for tier, blocks in event.blocks.items()}
        self._take_over(stamp.source, log, fresh, now)
        if log.highest_seq > stamp.seq:
            return self._ask(stamp.source, log, now)
        log.highest_seq = stamp.seq
        return []

    def unknown(self) -> set[str]:
        """Sources of whose lives no snapshot has been taken in yet."""
        return {source for source, log in self._logs.items() if not log.known}

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

    def take_in(self, now: float) -> list[Command]:
        """The next piece of a snapshot, if one is due; and when it was the last, what has waited behind it."""
        if not self._intakes or now < self._piece_due_s:
            return []
        self._piece_due_s = now + PIECE_PAUSE_S
        source = next(iter(self._intakes))
        log = self._logs[source]
        assert log.intake is not None
        holder, blocks = log.intake.pieces.popleft()
        self._index.store(holder, None, blocks)
        return [] if log.intake.pieces else self._end_intake(source, log, now)

    def next_deadline(self) -> float:
        piece_due_s = self._piece_due_s if self._intakes else math.inf
        if not self._asked:
            return piece_due_s
        asked = [log.asked_s for log in self._logs.values() if log.asked_s is not None]
        return min(min(asked) + self._snapshot_retry_s, piece_due_s)

    def check(self) -> None:
        asked = {source for source, log in self._logs.items() if log.asked_s is not None}
        if asked != set(self._asked):
            raise InvariantError(f"snapshots are owed by {sorted(asked)}, and counted for {sorted(self._asked)}")
        intakes = {source for source, log in self._logs.items() if log.intake is not None}
        if intakes != set(self._intakes):
            raise InvariantError(f"snapshots of {sorted(intakes)} are taken in, those of {sorted(self._intakes)} are counted")
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

    def _apply(self, event: CacheChange, log: SourceLog) -> bool:
        """Tell the index, now or behind a snapshot that is taken in. False if blocks were stored under an unknown parent."""
        if log.intake is not None:
            log.intake.later.append(event)
            return True
        holder = self._holder(event.stamp.source, event.tier, log)
        if isinstance(event, BlocksStored):
            return self._index.store(holder, event.parent, event.blocks)
        if isinstance(event, BlocksRemoved):
            self._index.remove(holder, event.blocks)
        else:
            self._index.clear(holder)
        return True

    def _take_over(self, source: str, log: SourceLog, fresh: Mapping[Holder, tuple[BlockHash, ...]], now: float) -> None:
        """The source holds what is `fresh` and nothing else: at once if that is little, else beginning with nothing."""
        self._drop_intake(source)
        if sum(map(len, fresh.values())) <= self._piece_blocks:
            for holder in log.holders:
                self._index.replace(holder, fresh.get(holder, ()))
            log.known = True
            return
        for holder in log.holders:
            self._index.replace(holder, ())
            self._index.doubt(holder)
        log.intake = Intake(deque(self._pieces(fresh)))
        self._intakes[source] = None
        self._piece_due_s = min(self._piece_due_s, now) if len(self._intakes) > 1 else now

    def _pieces(self, fresh: Mapping[Holder, tuple[BlockHash, ...]]) -> Iterator[tuple[Holder, tuple[BlockHash, ...]]]:
        for holder, blocks in fresh.items():
            for start in range(0, len(blocks), self._piece_blocks):
                yield holder, blocks[start : start + self._piece_blocks]

    def _end_intake(self, source: str, log: SourceLog, now: float) -> list[Command]:
        assert log.intake is not None
        later, log.known = log.intake.later, True
        self._drop_intake(source)
        if log.asked_s is None:
            for holder in log.holders:
                self._index.trust(holder)
        known = [self._apply(event, log) for event in later]
        return [] if all(known) or log.asked_s is not None else self._ask(source, log, now)

    def _drop_intake(self, source: str) -> None:
        self._logs[source].intake = None
        self._intakes.pop(source, None)

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
        return log

    def _forget(self, source: str) -> None:
        """Drop the claims of a source, except those on what others report as well: a node's tiers and the shared one."""
        log = self._logs.get(source)
        others = {holder for other, known in self._logs.items() if other != source for holder in known.holders}
        holders: Iterable[Holder] = () if log is None else log.holders
        for holder in holders:
            if holder not in others:
                self._index.clear(holder)
        self._asked.pop(source, None)
        self._intakes.pop(source, None)
