"""Moves blocks between the caches of simulated workers: what a placement fetches, and what a migration copies.

The source pins what it sends. It sends the longest run of the wanted blocks that it still holds; what it has lost since the
decision is computed instead. Fetched blocks stay in the target's cache, so replicas follow demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from conductor.core.commands import DropBlocks, TransferBlocks
from conductor.core.events import TransferFailed, TransferFinished
from conductor.core.types import Tier, WorkerId
from traces.clusters.profile import ClusterProfile
from traces.sim.job import Job
from traces.sim.links import Network
from traces.sim.loop import EventLoop

if TYPE_CHECKING:
    from traces.sim_workers import SimWorker


class BlockMover:
    """Carries out fetches and migrations between the device pools of `workers`."""

    def __init__(
        self, loop: EventLoop, network: Network, profile: ClusterProfile, workers: Mapping[WorkerId, SimWorker]
    ) -> None:
        self._loop = loop
        self._network = network
        self._block_bytes = profile.kv_bytes_per_token * profile.block_tokens
        self._block_tokens = profile.block_tokens
        self._workers = workers

    def fetch(self, job: Job, target: SimWorker, submit: Callable[[Job], None]) -> None:
        """Pull what the job's placement fetches, then submit the job."""
        plan = job.placement.reuse
        source = None if plan.source is None else self._workers.get(plan.source.owner)
        first = plan.local_tokens // self._block_tokens
        wanted = job.request.block_hashes[first : first + plan.fetched_tokens // self._block_tokens]
        held = 0 if source is None else source.cache.match(wanted)
        if source is None or not held:
            submit(job)
            return
        blocks = wanted[:held]
        source.cache.pin(blocks)
        local = job.request.block_hashes[: target.cache.match(job.request.block_hashes[:first])]
        target.cache.pin(local)
        job.pinned = len(local)
        job.flow = self._network.start(
            "fetch",
            (source.outgoing, target.incoming),
            held * self._block_bytes,
            self._fetched,
            job,
            blocks,
            source,
            target,
            submit,
        )

    def _fetched(
        self, job: Job, blocks: tuple[int, ...], source: SimWorker, target: SimWorker, submit: Callable[[Job], None]
    ) -> None:
        job.flow = None
        source.cache.unpin(blocks)
        first = job.placement.reuse.local_tokens // self._block_tokens
        if job.pinned == first and target.cache.free_blocks >= len(blocks):
            self._keep(target, job.request.block_hashes[first - 1] if first else None, blocks)
            job.pinned = first + len(blocks)
        submit(job)

    def _keep(self, target: SimWorker, parent: int | None, blocks: tuple[int, ...]) -> None:
        """Store blocks, pinned, and report what came and what went for it."""
        added, evicted = target.cache.store(blocks)
        if evicted:
            target.reporter.removed(Tier.DEVICE, evicted)
        if added:
            first = blocks.index(added[0])
            target.reporter.stored(Tier.DEVICE, blocks[first - 1] if first else parent, added)

    def transfer(self, command: TransferBlocks) -> None:
        """Copy blocks from one device pool to another, as the scheduler's replicator asks."""
        source, target = self._workers.get(command.source.owner), self._workers.get(command.target.owner)
        if source is None or target is None:
            self._fail(command, "a worker is gone")

    def drop(self, command: DropBlocks) -> None:
        """Advice that the simulated pools take when the blocks are free."""

    def forget(self, worker_id: WorkerId) -> None:
        """Break off what comes from or goes to a lost worker."""
