"""One simulated worker during one life: its card, its caches, its engine, its reports."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from conductor.core.events import LoadReported
from conductor.core.types import Tier, WorkerLoad, WorkerSpec
from traces.sim.cache import BlockCache
from traces.sim.decode import DecodeEngine
from traces.sim.links import Link
from traces.sim.prefill import PrefillEngine
from traces.sim.reporter import Reporter


class TierStore:
    """Blocks in a tier below the device pool, least recently used first, leaves before roots. Written through from above."""

    def __init__(self, capacity_blocks: int, channel: Link) -> None:
        self.capacity_blocks = capacity_blocks
        self.channel = channel
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def contents(self) -> tuple[int, ...]:
        return tuple(self._blocks)

    def match(self, blocks: Sequence[int]) -> int:
        """How many of `blocks`, from the first on, are held."""
        for count, block in enumerate(blocks):
            if block not in self._blocks:
                return count
        return len(blocks)

    def use(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Store a whole prefix, or mark it as used. Returns the blocks that are new, and those evicted for them.

        A prefix longer than the tier keeps its first blocks.
        """
        held = self._blocks
        kept = blocks[: self.capacity_blocks]
        added = [block for block in kept if block not in held]
        for block in reversed(kept):
            held[block] = None
            held.move_to_end(block)
        evicted = []
        while len(held) > self.capacity_blocks:
            evicted.append(held.popitem(last=False)[0])
        return added, evicted


@dataclass(eq=False, slots=True)
class SimWorker:
    """`tiers` hold what the worker's node, or the cluster, keeps below the device pool; `storage` is its card to the
    shared store."""

    spec: WorkerSpec
    reporter: Reporter
    cache: BlockCache
    incoming: Link
    outgoing: Link
    storage: Link | None = None
    tiers: dict[Tier, TierStore] = field(default_factory=dict)
    prefill: PrefillEngine | None = None
    decode: DecodeEngine | None = None

    def keep(self, parent: int | None, blocks: Sequence[int]) -> None:
        """Store blocks that came from elsewhere in the device pool, pinned, and report what came and went."""
        added, evicted = self.cache.store(blocks)
        if evicted:
            self.reporter.removed(Tier.DEVICE, evicted)
        if added:
            first = blocks.index(added[0])
            self.reporter.stored(Tier.DEVICE, blocks[first - 1] if first else parent, added)

    def write_through(self, blocks: Sequence[int]) -> None:
        """A prompt is complete: its blocks go to every lower tier, or count as used there."""
        for tier, store in self.tiers.items():
            added, evicted = store.use(blocks)
            if evicted:
                self.reporter.removed(tier, evicted)
            if added:
                first = blocks.index(added[0])
                self.reporter.stored(tier, blocks[first - 1] if first else None, added)

    def report_load(self) -> None:
        """Tell the load of the engines; what runs counts as long as the worker's own profile says."""
        own = WorkerLoad() if self.prefill is None else self.prefill.load()
        if self.decode is not None:
            own = replace(own, decode_batch=self.decode.batch, decode_context_tokens=self.decode.context_tokens)
        self.reporter.emit(LoadReported(self.spec.id, self.reporter.epoch, own))

    def snapshot(self) -> None:
        """Report everything that is held."""
        held = {Tier.DEVICE: self.cache.contents()}
        held.update({tier: store.contents() for tier, store in self.tiers.items()})
        self.reporter.snapshot(held)
