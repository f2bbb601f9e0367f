"""Moves blocks into the device pools of simulated workers: what a placement fetches, and what a migration copies.

The source pins what it sends. It sends the longest run of the wanted blocks that it still holds; what it has lost since the
decision is computed instead. A fetch waits in line until the target has room, and takes it before the first byte. Fetched
blocks stay in the target's pool, so replicas follow demand. Peers send over both network cards; lower tiers send over their
own channel, the shared store also over a network card: the target's, or that of the decode worker which reads for it. When
that one dies, the target begins anew over its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from conductor.core.commands import DropBlocks, TransferBlocks
from conductor.core.events import Event, TransferFailed, TransferFinished
from conductor.core.types import SHARED_STORE, Holder, ReusePlan, Tier, WorkerId
from traces.clusters.profile import ClusterProfile
from traces.sim.job import Job
from traces.sim.links import Flow, Link, Network
from traces.sim.loop import EventLoop

if TYPE_CHECKING:
    from traces.sim.worker import SimWorker


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks on their way to `target`. `source` is None when they come from a tier that pins nothing; `relay` reads them from
    the shared store."""

    flow: Flow
    blocks: Sequence[int]
    source: SimWorker | None
    target: SimWorker
    relay: SimWorker | None = None


class BlockMover:
    """Carries out fetches and migrations between the pools of `workers`."""

    def __init__(
        self,
        loop: EventLoop,
        network: Network,
        profile: ClusterProfile,
        workers: Mapping[WorkerId, SimWorker],
        deliver: Callable[[Event], None],
        parent_of: Callable[[], Mapping[int, int | None]],
    ) -> None:
        self._loop = loop
        self._network = network
        self._block_bytes = profile.kv_bytes_per_token * profile.block_tokens
        self._block_tokens = profile.block_tokens
        self._workers = workers
        self._deliver = deliver
        self._parent_of = parent_of
        self._lines: dict[WorkerId, deque[tuple[Job, Callable[[Job], None]]]] = {}
        self._fetches: dict[str, Fetch] = {}
        self._copies: dict[str, Fetch] = {}

    def fetch(self, job: Job, target: SimWorker, submit: Callable[[Job], None]) -> None:
        """Pull what the job's placement fetches as soon as `target` has room for it, then submit the job."""
        self._lines.setdefault(target.spec.id, deque()).append((job, submit))
        self.begin_fetches(target)

    def begin_fetches(self, target: SimWorker) -> None:
        """Start those in line that there is room for, in order. Nothing starts while a prompt that is here waits for room."""
        line = self._lines.get(target.spec.id)
        while line and not (target.prefill is not None and target.prefill.blocked) and self._begin(target, *line[0]):
            line.popleft()

    def _begin(self, target: SimWorker, job: Job, submit: Callable[[Job], None]) -> bool:
        """Start a fetch, or submit the job when there is nothing to fetch. False when there is no room yet."""
        plan, cache = job.placement.reuse, target.cache
        first = plan.local_tokens // self._block_tokens
        wanted = job.request.block_hashes[first : first + plan.fetched_tokens // self._block_tokens]
        blocks = () if plan.source is None else wanted[: self._held(plan.source, target, wanted)]
        if plan.source is None or not blocks or first + len(blocks) > cache.capacity_blocks:
            submit(job)
            return True
        self._hold(job, target, first)
        if len(blocks) > cache.free_blocks:
            cache.unpin(job.request.block_hashes[: job.pinned])
            job.pinned = 0
            return False
        evicted = cache.take_anonymous(len(blocks))
        if evicted:
            target.reporter.removed(Tier.DEVICE, evicted)
        self._send(job, target, plan, blocks, submit)
        return True

    def _send(self, job: Job, target: SimWorker, plan: ReusePlan, blocks: Sequence[int], submit: Callable[[Job], None]) -> None:
        holder = plan.source
        assert holder is not None
        source = self._workers.get(holder.owner) if holder.tier is Tier.DEVICE else None
        relay = None if plan.relay is None else self._workers.get(plan.relay)
        links = self._links(holder, target, relay)
        path = "peer_fetch" if source else f"{holder.tier.name.lower()}_restore"
        path += "_relayed" if relay else ""
        flow = self._network.start(path, links, len(blocks) * self._block_bytes, self._fetched, job, submit)
        if source is not None:
            source.cache.pin(blocks)
        self._fetches[job.request.id] = Fetch(flow, blocks, source, target, relay)

    def abort(self, job: Job) -> None:
        """Break off the job's fetch, if it has one."""
        for line in self._lines.values():
            for entry in [entry for entry in line if entry[0] is job]:
                line.remove(entry)
        fetch = self._fetches.pop(job.request.id, None)
        if fetch is not None:
            fetch.target.cache.release_anonymous(len(fetch.blocks))
            self._stop(fetch)

    def transfer(self, command: TransferBlocks) -> None:
        """Copy blocks from one device pool to another, as the scheduler's replicator asks."""
        source, target = self._workers.get(command.source.owner), self._workers.get(command.target.owner)
        if source is None or target is None or Tier.DEVICE not in (command.source.tier, command.target.tier):
            self._deliver(TransferFailed(command.transfer_id, "source or target is gone"))
            return
        blocks = command.blocks[: source.cache.match(command.blocks)]
        if not blocks:
            self._deliver(TransferFailed(command.transfer_id, f"{command.source.owner} holds none of the blocks"))
            return
        source.cache.pin(blocks)
        links = (source.outgoing, target.incoming)
        size_bytes = len(blocks) * self._block_bytes
        flow = self._network.start(command.reason.value, links, size_bytes, self._copied, command)
        self._copies[command.transfer_id] = Fetch(flow, blocks, source, target)

    def drop(self, command: DropBlocks) -> None:
        """Make blocks the first to be evicted from a device pool; other tiers do as they do."""
        worker = self._workers.get(command.holder.owner)
        if worker is not None and command.holder.tier is Tier.DEVICE:
            worker.cache.demote(command.blocks, self._parent_of())

    def forget(self, worker: SimWorker) -> None:
        """Break off what comes from or goes to a lost worker; jobs whose source is gone compute instead."""
        self._lines.pop(worker.spec.id, None)
        for transfer_id, copy in list(self._copies.items()):
            if worker in (copy.source, copy.target):
                del self._copies[transfer_id]
                self._stop(copy)
                self._deliver(TransferFailed(transfer_id, f"{worker.spec.id} is gone"))
        for request, fetch in list(self._fetches.items()):
            if fetch.source is worker:
                self._network.stop(fetch.flow)
                fetch.flow.arrived()
            elif fetch.relay is worker:
                self._network.stop(fetch.flow)
                links = self._links(Holder(SHARED_STORE, Tier.SHARED), fetch.target)
                flow = self._network.start("shared_restore", links, fetch.flow.size_bytes, fetch.flow.arrived)
                self._fetches[request] = replace(fetch, flow=flow, relay=None)

    def _held(self, holder: Holder, target: SimWorker, wanted: Sequence[int]) -> int:
        """How many of `wanted`, from the first on, the holder can send."""
        if holder.tier is not Tier.DEVICE:
            store = target.tiers.get(holder.tier)
            return 0 if store is None else store.match(wanted)
        source = self._workers.get(holder.owner)
        return 0 if source is None else source.cache.match(wanted)

    def _links(self, holder: Holder, target: SimWorker, relay: SimWorker | None = None) -> tuple[Link, ...]:
        if holder.tier is Tier.DEVICE:
            return (self._workers[holder.owner].outgoing, target.incoming)
        channel = target.tiers[holder.tier].channel
        return (channel, *_cards(target, relay)) if holder.tier is Tier.SHARED else (channel,)

    def _hold(self, job: Job, target: SimWorker, first: int) -> None:
        """Keep the local part of the prefix while the rest travels."""
        local = job.request.block_hashes[: target.cache.match(job.request.block_hashes[:first])]
        target.cache.pin(local)
        job.pinned = len(local)

    def _fetched(self, job: Job, submit: Callable[[Job], None]) -> None:
        fetch = self._fetches.pop(job.request.id)
        fetch.target.cache.release_anonymous(len(fetch.blocks))
        first = job.placement.reuse.local_tokens // self._block_tokens
        intact = fetch.source is None or fetch.source.spec.id in self._workers
        if intact and job.pinned == first:
            fetch.target.keep(job.request.block_hashes[first - 1] if first else None, fetch.blocks)
            job.pinned = first + len(fetch.blocks)
        self._let_go(fetch)
        submit(job)

    def _copied(self, command: TransferBlocks) -> None:
        copy = self._copies.pop(command.transfer_id)
        cache = copy.target.cache
        if cache.free_blocks >= len(copy.blocks):
            copy.target.keep(None, copy.blocks)
            cache.unpin(copy.blocks)
        self._let_go(copy)
        duration_s = self._loop.now - copy.flow.started_s
        self._deliver(TransferFinished(command.transfer_id, copy.flow.size_bytes, duration_s))

    def _stop(self, fetch: Fetch) -> None:
        self._network.stop(fetch.flow)
        self._let_go(fetch)

    @staticmethod
    def _let_go(fetch: Fetch) -> None:
        """The source may evict what it sent."""
        if fetch.source is not None:
            fetch.source.cache.unpin(fetch.blocks)
            if fetch.source.prefill is not None:
                fetch.source.prefill.room_freed()


def _cards(target: SimWorker, relay: SimWorker | None) -> tuple[Link, ...]:
    """The cards between the shared store and `target`."""
    if relay is None:
        return (target.storage or target.incoming,)
    return (relay.storage or relay.incoming, relay.outgoing, target.incoming)
