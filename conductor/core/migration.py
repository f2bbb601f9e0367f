"""Hot prefixes are copied ahead of demand, within a budget, and cold copies are given up first.

Every match heats the head of the prompt that is cached somewhere; heat halves with time. Every `interval_s` the hottest heads
are looked at: a further copy is made where it pays, that is where the prefill time which it is likely to save outweighs what
its transfer costs the links and its blocks cost the target's cache,

    heat rate * prefill seconds saved / (replicas + 1)  >  transfer seconds / half-life + prefill seconds * share of the cache

per second. Copies go to the failure domain (zone, rack, node) that has the fewest, never over a link that is busy, never more
than `max_replicas`, and never beyond `budget_bytes_per_s`. Copies made here whose head has gone cold are dropped. The paper
replicates by demand alone (Mooncake FAST'25, section 6.2); with a budget of 0, the default, so does this. What
workers that leave hand on (`departures.py`) knows no budget.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from conductor.core.cluster_view import ClusterView, Flow
from conductor.core.commands import Command, DropBlocks, TransferBlocks
from conductor.core.config import MigrationConfig
from conductor.core.departures import Departures
from conductor.core.events import TransferFailed, TransferFinished
from conductor.core.prefix_index import PrefixIndex, PrefixMatch
from conductor.core.types import BlockHash, Holder, InvariantError, Tier, TransferReason, WorkerId

HEADS_A_ROUND = 16
MAX_BURST_INTERVALS = 2.0
COLD_SHARE = 4.0  # copies are given up at this fraction of `min_heat`, and forgotten at the same fraction of that


@dataclass(slots=True)
class Head:
    """A cached prefix that several prompts share. `heat` is as of `seen_s`."""

    blocks: tuple[BlockHash, ...]
    heat: float
    seen_s: float
    copies: dict[WorkerId, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Copy:
    """A transfer in flight, and why it was thought worth its cost."""

    head: BlockHash
    command: TransferBlocks
    flow: Flow
    heat: float
    saved_s_per_s: float
    cost_s_per_s: float


class Migration:
    """Owns the heat and the copies in flight. While the budget is 0 it copies for workers that leave alone."""

    def __init__(self, config: MigrationConfig, view: ClusterView, index: PrefixIndex, block_tokens: int) -> None:
        self._config = config
        self._view = view
        self._index = index
        self._block_tokens = block_tokens
        self._heads: dict[BlockHash, Head] = {}
        self._copies: dict[str, Copy] = {}
        self._numbers = 0
        self._due_s = math.inf
        self._allowance_bytes = 0.0
        self._last_round_s: float | None = None
        self.departures = Departures(config, view, index, block_tokens)

    def observe(self, blocks: tuple[BlockHash, ...], match: PrefixMatch, now: float) -> None:
        """A request was decided: what of its prompt is cached anywhere gets warmer."""
        self.departures.observe(blocks, now)
        depth = int(match.confirmed.max(initial=0)) if self._config.budget_bytes_per_s > 0.0 else 0
        if depth == 0:
            return
        key = blocks[depth - 1]
        head = self._heads.pop(key, None) or Head(blocks[:depth], 0.0, now)
        head.heat, head.seen_s = self._heat(head, now) + 1.0, now
        self._heads[key] = head
        if len(self._heads) > self._config.tracked_prefixes:
            del self._heads[next(iter(self._heads))]
        self._due_s = min(self._due_s, now + self._config.interval_s)

    def next_deadline(self) -> float:
        return min(self._due_s, self.departures.next_deadline())

    def round(self, now: float) -> list[Command]:
        """The copies to make and to give up, as far as anything is due."""
        return self.departures.round(now) + (self._replicate(now) if now >= self._due_s else [])

    def _replicate(self, now: float) -> list[Command]:
        self._refill(now)
        commands = self._drop_cold(now)
        warm = [head for head in self._heads.values() if self._heat(head, now) >= self._config.min_heat]
        warm.sort(key=lambda head: (-self._heat(head, now), head.blocks[-1]))
        for head in warm[:HEADS_A_ROUND]:
            copy = self._worthwhile(head, now)
            if copy is not None:
                commands.append(self._begin(head, copy))
        self._due_s = now + self._config.interval_s if self._heads else math.inf
        return commands

    def ended(self, event: TransferFinished | TransferFailed, now: float) -> list[Command]:
        copy = self._end(event.transfer_id)
        if copy is not None and copy.head in self._heads and isinstance(event, TransferFinished):
            self._heads[copy.head].copies[copy.command.target.owner] = None
        return self.departures.ended(event, now)

    def worker_lost(self, worker: WorkerId, now: float) -> None:
        """Neither a copy there nor a transfer from or to it will be heard of again."""
        self.departures.worker_lost(worker, now)
        for transfer_id, copy in list(self._copies.items()):
            if worker in (copy.flow.source, copy.flow.target):
                self._end(transfer_id)
        for head in self._heads.values():
            head.copies.pop(worker, None)

    def explain(self) -> list[dict[str, Any]]:
        """The transfers in flight with the reckoning that started them, as JSON values."""
        return [
            {
                "transfer_id": transfer_id,
                "source": copy.flow.source,
                "target": copy.flow.target,
                "blocks": len(copy.command.blocks),
                "heat": copy.heat,
                "saved_s_per_s": copy.saved_s_per_s,
                "cost_s_per_s": copy.cost_s_per_s,
            }
            for transfer_id, copy in self._copies.items()
        ] + self.departures.explain()

    def check(self) -> None:
        self.departures.check()
        if self._config.budget_bytes_per_s <= 0.0 and (self._heads or self._copies):
            raise InvariantError("a replicator without budget has something to do")
        if len(self._heads) > self._config.tracked_prefixes:
            raise InvariantError(f"{len(self._heads)} prefixes tracked, {self._config.tracked_prefixes} allowed")

    def _heat(self, head: Head, now: float) -> float:
        return head.heat * math.exp2((head.seen_s - now) / self._config.heat_half_life_s)

    def _refill(self, now: float) -> None:
        """Let the budget grow; what is not used for long is lost, so that no burst fills the links."""
        budget, interval_s = self._config.budget_bytes_per_s, self._config.interval_s
        passed_s = interval_s if self._last_round_s is None else now - self._last_round_s
        self._allowance_bytes = min(self._allowance_bytes + budget * passed_s, budget * interval_s * MAX_BURST_INTERVALS)
        self._last_round_s = now

    def _drop_cold(self, now: float) -> list[Command]:
        """Give up copies made here of heads that have gone cold, but no block that a warmer head shares."""
        limit = self._config.min_heat / COLD_SHARE
        cold = [head for _, head in sorted(self._heads.items()) if self._heat(head, now) < limit]
        commands: list[Command] = []
        if any(head.copies for head in cold):
            warm = {block for head in self._heads.values() if self._heat(head, now) >= limit for block in head.blocks}
            for head in cold:
                blocks = tuple(block for block in head.blocks if block not in warm)
                commands += [DropBlocks(Holder(worker, Tier.DEVICE), blocks) for worker in sorted(head.copies) if blocks]
        for head in cold:
            head.copies.clear()
            if self._heat(head, now) < limit / COLD_SHARE:
                del self._heads[head.blocks[-1]]
        return commands

    def _worthwhile(self, head: Head, now: float) -> Copy | None:
        """The best further copy of a head, if it pays, fits the budget and no busy link."""
        holders = [holder.owner for holder in self._index.holders(head.blocks[-1]) if holder.owner in self._view.prefill]
        coming = [copy.flow.target for copy in self._copies.values() if copy.head == head.blocks[-1]]
        sources = [worker for worker in holders if not self._busy(worker)]
        if not sources or len(holders) + len(coming) >= self._config.max_replicas:
            return None
        target = self._target([*holders, *coming])
        if target is None:
            return None
        tokens = len(head.blocks) * self._block_tokens
        flow = Flow(sources[0], target)
        saved_s, cost_s = self._reckon(head, flow, tokens, len(holders) + len(coming), now)
        too_large = self._view.specs[target].profile.moved_bytes(tokens) > self._allowance_bytes
        if saved_s <= cost_s or too_large:
            return None
        self._numbers += 1
        source = Holder(sources[0], Tier.DEVICE)
        command = TransferBlocks(
            f"copy-{self._numbers}", source, Holder(target, Tier.DEVICE), head.blocks, TransferReason.REPLICATE
        )
        return Copy(head.blocks[-1], command, flow, self._heat(head, now), saved_s, cost_s)

    def _reckon(self, head: Head, flow: Flow, tokens: int, replicas: int, now: float) -> tuple[float, float]:
        """Prefill seconds that a copy saves, and costs, a second."""
        target = flow.target
        pool, config = self._view.prefill, self._config
        prefill_s = pool.prefill_s(target, tokens, 0)
        rate = self._heat(head, now) * math.log(2.0) / config.heat_half_life_s
        saved = rate * prefill_s / (replicas + 1)
        row = pool.row[target]
        transfer_s = self._view.copy_s(flow.source, target, tokens)
        share = len(head.blocks) / float(pool.capacity_blocks[row])
        return saved, (transfer_s + prefill_s * share) / config.heat_half_life_s

    def _target(self, taken: list[WorkerId]) -> WorkerId | None:
        """A worker without the prefix and with no busy link, in the failure domain that has it least; then the idlest."""
        specs, pool = self._view.specs, self._view.prefill
        zones = Counter(specs[worker].zone for worker in taken)
        racks = Counter((specs[worker].zone, specs[worker].rack) for worker in taken)
        nodes = Counter(specs[worker].node for worker in taken)
        free = [w for w in pool.ids if w not in taken and pool.accepts[pool.row[w]] and not self._busy(w)]

        def crowd(worker: WorkerId) -> tuple[int, int, int, float, WorkerId]:
            spec, churn = specs[worker], float(pool.churn_tokens[pool.row[worker]])
            return zones[spec.zone], racks[spec.zone, spec.rack], nodes[spec.node], churn, worker

        return min(free, key=crowd, default=None)

    def _busy(self, worker: WorkerId) -> bool:
        pool, row = self._view.prefill, self._view.prefill.row[worker]
        return bool(pool.flows_in[row] or pool.flows_out[row])

    def _begin(self, head: Head, copy: Copy) -> Command:
        size_bytes = self._view.specs[copy.flow.target].profile.moved_bytes(len(head.blocks) * self._block_tokens)
        self._allowance_bytes -= size_bytes
        self._copies[copy.command.transfer_id] = copy
        self._view.open_flow(copy.flow)
        return copy.command

    def _end(self, transfer_id: str) -> Copy | None:
        copy = self._copies.pop(transfer_id, None)
        if copy is not None:
            self._view.close_flow(copy.flow)
        return copy
