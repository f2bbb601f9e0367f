"""Brute-force models of what the scheduler may believe, fed with the same events: caches by report, requests by command.

They share no code with the core: plain dicts and sets, as slow as they like.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from conductor.core.commands import Cancel, Command, Reject, RequestSnapshot, ResumeRequest, StartDecode, StartPrefill
from conductor.core.events import BlocksRemoved, BlocksStored, CacheCleared, IndexSnapshot
from conductor.core.types import Placement, Rejection, RejectReason, RequestId, Stamp, Tier, WorkerId

CacheReport = BlocksStored | BlocksRemoved | CacheCleared | IndexSnapshot
FAMILIES = 4
DEPTH = 8
COMMON = 3  # the first two families share their first blocks


def chain(family: int, blocks: int = DEPTH) -> tuple[int, ...]:
    return tuple((1 if family < 2 and depth < COMMON else family + 10) * 1000 + depth for depth in range(blocks))


ALL_BLOCKS = tuple(dict.fromkeys(block for family in range(FAMILIES) for block in chain(family)))


@dataclass(slots=True)
class ShadowWorker:
    """A worker as it really is: its life, its caches (each closed downwards), and the reports that are under way."""

    id: WorkerId
    epoch: int = 0
    seq: int = 0
    caches: dict[Tier, set[int]] = field(default_factory=dict)
    sent: list[CacheReport] = field(default_factory=list)

    def restart(self) -> None:
        self.epoch, self.seq = self.epoch + 1, 0
        self.caches = {}

    def stamp(self) -> Stamp:
        self.seq += 1
        return Stamp(self.id, self.epoch, self.seq)

    def store(self, tier: Tier, blocks: Sequence[int]) -> BlocksStored:
        """Hold a chain from the root on; only what is missing is reported."""
        cache = self.caches.setdefault(tier, set())
        held = next((depth for depth, block in enumerate(blocks) if block not in cache), len(blocks))
        cache.update(blocks)
        return BlocksStored(self.stamp(), tier, blocks[held - 1] if held else None, tuple(blocks[held:]))

    def evict(self, tier: Tier, block: int) -> BlocksRemoved:
        """Drop a block and all that descend from it, leaves first."""
        cache = self.caches.setdefault(tier, set())
        gone = {one for family in range(FAMILIES) if block in chain(family) for one in chain(family)[block % 1000 :]} & cache
        cache -= gone
        return BlocksRemoved(self.stamp(), tier, tuple(sorted(gone, key=lambda one: -(one % 1000))))

    def clear(self, tier: Tier) -> CacheCleared:
        self.caches[tier] = set()
        return CacheCleared(self.stamp(), tier)

    def snapshot(self) -> IndexSnapshot:
        ordered = {tier: tuple(sorted(cache, key=lambda one: one % 1000)) for tier, cache in self.caches.items()}
        return IndexSnapshot(Stamp(self.id, self.epoch, self.seq), ordered)


class ReportedCaches:
    """The most that an honest index may claim of each source and tier, from the reports that have come in, in any order.

    A block may be claimed if the highest stamp that speaks of it says that it is there."""

    def __init__(self) -> None:
        self.epochs: dict[WorkerId, int] = {}
        self._dead: dict[WorkerId, int] = {}
        self._held: dict[tuple[WorkerId, Tier], dict[int, int]] = {}

    def may_claim(self, source: WorkerId, tier: Tier) -> frozenset[int]:
        return frozenset(self._held.get((source, tier), ()))

    def begins(self, source: WorkerId, epoch: int) -> bool:
        """Whether a life can be listened to; a later one forgets the former."""
        if epoch <= self._dead.get(source, 0) or epoch < self.epochs.get(source, 0):
            return False
        if epoch > self.epochs.get(source, 0):
            self.forget(source)
            self.epochs[source] = epoch
        return True

    def ends(self, source: WorkerId, epoch: int) -> None:
        self._dead[source] = max(epoch, self._dead.get(source, 0))
        self.forget(source)

    def forget(self, source: WorkerId) -> None:
        self.epochs.pop(source, None)
        for key in [key for key in self._held if key[0] == source]:
            del self._held[key]

    def take(self, report: CacheReport) -> None:
        stamp = report.stamp
        if not self.begins(stamp.source, stamp.epoch):
            return
        if isinstance(report, IndexSnapshot):
            for tier in Tier:
                self._drop(stamp, tier, set(ALL_BLOCKS) - set(report.blocks.get(tier, ())))
                self._add(stamp, tier, report.blocks.get(tier, ()))
        elif isinstance(report, BlocksStored):
            self._add(stamp, report.tier, report.blocks)
        elif isinstance(report, BlocksRemoved):
            self._drop(stamp, report.tier, report.blocks)
        else:
            self._drop(stamp, report.tier, ALL_BLOCKS)

    def _add(self, stamp: Stamp, tier: Tier, blocks: Iterable[int]) -> None:
        held = self._held.setdefault((stamp.source, tier), {})
        for block in blocks:
            held[block] = max(held.get(block, 0), stamp.seq)

    def _drop(self, stamp: Stamp, tier: Tier, blocks: Iterable[int]) -> None:
        held = self._held.setdefault((stamp.source, tier), {})
        for block in blocks:
            if held.get(block, stamp.seq) < stamp.seq:
                del held[block]


@dataclass(slots=True)
class Life:
    """One request as its commands tell of it. `placement` is set while an attempt runs."""

    attempt: int = 1
    placement: Placement | None = None
    decode: WorkerId | None = None
    interrupted: bool = False
    resumed: bool = False


class Ledger:
    """Which requests are in flight and how the others ended, from the commands and from what ended silently (I1, I10)."""

    def __init__(self) -> None:
        self.live: dict[RequestId, Life] = {}
        self.ended: Counter[str] = Counter()
        self.arrived = 0
        self.rejections: list[Rejection] = []

    def arrive(self, request_id: RequestId) -> None:
        if request_id not in self.live:
            self.arrived += 1
            self.live[request_id] = Life()

    def resume(self, request_id: RequestId, attempt: int) -> None:
        life = self.live.get(request_id)
        if life is not None and life.interrupted and attempt == life.attempt + 1:
            life.attempt, life.interrupted, life.resumed = attempt, False, True

    def finish(self, request_id: RequestId, attempt: int, outcome: str) -> None:
        life = self.live.get(request_id)
        if life is None or life.attempt != attempt:
            return
        if life.placement is not None or (
            life.interrupted and outcome == "finished"
        ):  # it had finished before it was interrupted
            self._end(request_id, outcome)

    def cancel(self, request_id: RequestId) -> None:
        if request_id in self.live:
            self._end(request_id, "cancelled")

    def obey(self, command: Command, known: Iterable[WorkerId], accepting: Iterable[WorkerId]) -> None:
        """Follow a command, and hold it against what may be asked at all."""
        if isinstance(command, StartPrefill):
            self._place(command.placement, set(accepting))
        elif isinstance(command, StartDecode):
            life = self.live[command.request_id]
            assert (life.attempt, life.decode) == (command.attempt, None), "I10: the decode worker is chosen once"
            assert life.placement is not None
            assert command.worker_id in set(accepting)
            life.decode = command.worker_id
        elif isinstance(command, ResumeRequest):
            life = self.live[command.request_id]
            assert life.placement is not None, "only what runs is interrupted"
            assert life.attempt == command.attempt
            life.placement, life.decode, life.interrupted = None, None, True
        elif isinstance(command, Reject):
            self._reject(command.rejection)
        elif isinstance(command, Cancel):
            assert set(command.workers) <= set(known), "nobody unknown is asked to cancel"
            assert len(set(command.workers)) == len(command.workers) > 0
        elif isinstance(command, RequestSnapshot):
            assert command.source in set(known)

    def _place(self, placement: Placement, accepting: set[WorkerId]) -> None:
        life = self.live[placement.request_id]
        assert life.placement is None, "I10: at most one live attempt"
        assert not life.interrupted, "an interrupted request is placed by its continuation alone"
        assert placement.attempt == life.attempt
        assert placement.prefill in accepting
        assert placement.decode is None or placement.decode in accepting
        assert min(placement.ttft.queue_s, placement.ttft.transfer_s, placement.ttft.prefill_s) >= 0.0, "I5"
        assert placement.ttft.low_s <= placement.ttft.high_s
        life.placement, life.decode = placement, placement.decode

    def _reject(self, rejection: Rejection) -> None:
        life = self.live[rejection.request_id]
        assert rejection.message
        assert rejection.retry_after_s > 0.0
        self.rejections.append(rejection)
        given_up = rejection.reason is RejectReason.RETRIES_EXHAUSTED and life.placement is not None
        self._end(rejection.request_id, "failed" if given_up else "rejected")

    def _end(self, request_id: RequestId, outcome: str) -> None:
        del self.live[request_id]
        self.ended[outcome] += 1
