"""What a worker that leaves hands on: prefixes of recent prompts that nobody would have without it.

The index knows who has a block and no block's parent, so the chains to look for are those of the prompts that were decided
last, the newest first. What a worker that leaves has of one of them beyond everybody who stays (other device pools, lower tiers
of hosts where somebody stays, the shared store) is copied to the worker that lacks the least of it, if it comes there sooner
than it could be computed. Nobody is given more than a share of its pool: that is the newest of what the other had, against the
oldest of its own. A few copies travel at a time, and a few prompts are looked at in one call, so that no decision waits for a
departure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conductor.core.cluster_view import ClusterView, Flow
from conductor.core.commands import Command, TransferBlocks
from conductor.core.config import MigrationConfig
from conductor.core.events import TransferFailed, TransferFinished, WorkerDraining
from conductor.core.prefix_index import PrefixIndex
from conductor.core.types import BlockHash, Holder, InvariantError, Tier, TransferReason, WorkerId

MAX_BLOCKS = 500_000  # of all prompts remembered
HALF_LIVES = 10.0  # of heat, after which a prompt is not worth a copy any more
POOL_SHARE = 0.5
COPIES_AT_ONCE = 4
LOOKS_AT_ONCE = 32
PAUSE_S = 0.001  # between two calls that look


@dataclass(slots=True)
class Departure:
    """A worker that leaves. `waiting` prompts are yet to be looked at, the newest last; `handed` says who was given a block."""

    waiting: list[tuple[BlockHash, ...]]
    handed: dict[BlockHash, WorkerId] = field(default_factory=dict)
    given_blocks: dict[WorkerId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HandedOn:
    command: TransferBlocks
    flow: Flow


class Departures:
    def __init__(self, config: MigrationConfig, view: ClusterView, index: PrefixIndex, block_tokens: int) -> None:
        self._config = config
        self._view = view
        self._index = index
        self._block_tokens = block_tokens
        self._recent: dict[BlockHash, tuple[float, tuple[BlockHash, ...]]] = {}
        self._recent_blocks = 0
        self._leaving: dict[WorkerId, Departure] = {}
        self._copies: dict[str, HandedOn] = {}
        self._numbers = 0
        self._due_s = math.inf

    def observe(self, blocks: tuple[BlockHash, ...], now: float) -> None:
        """A request was decided: whoever has computed it may be the only one to have its prefix."""
        if not blocks:
            return
        known = self._recent.pop(blocks[-1], None)
        self._recent_blocks += len(blocks) - (0 if known is None else len(known[1]))  # a trace may give one name to two prompts
        self._recent[blocks[-1]] = now, blocks
        while len(self._recent) > self._config.tracked_prefixes or self._recent_blocks > MAX_BLOCKS:
            self._recent_blocks -= len(self._recent.pop(next(iter(self._recent)))[1])

    def draining(self, event: WorkerDraining, now: float) -> list[Command]:
        """A worker gets no new work from now on, and hands on what is worth it."""
        worker = event.worker_id
        self._view.drain(worker)
        if worker not in self._view.specs or worker in self._leaving:
            return []
        since_s = now - HALF_LIVES * self._config.heat_half_life_s
        self._leaving[worker] = Departure([blocks for seen_s, blocks in self._recent.values() if seen_s >= since_s])
        return self._go_on(now)

    def next_deadline(self) -> float:
        return self._due_s

    def round(self, now: float) -> list[Command]:
        """Look at what is left to be looked at."""
        return self._go_on(now) if now >= self._due_s else []

    def ended(self, event: TransferFinished | TransferFailed, now: float) -> list[Command]:
        """A copy is there, or will not be; the next one may begin."""
        return self._go_on(now) if self._end(event.transfer_id) else []

    def worker_lost(self, worker: WorkerId, now: float) -> None:
        """It leaves no more, and no copy from or to it will be heard of again."""
        self._leaving.pop(worker, None)
        for transfer_id, copy in list(self._copies.items()):
            if worker in (copy.flow.source, copy.flow.target):
                self._end(transfer_id)
        self._due_s = now + PAUSE_S if any(self._may_go_on(leaving) for leaving in self._leaving) else math.inf

    def explain(self) -> list[dict[str, Any]]:
        """The copies under way, as JSON values."""
        return [
            {
                "transfer_id": transfer_id,
                "source": copy.flow.source,
                "target": copy.flow.target,
                "blocks": len(copy.command.blocks),
                "reason": copy.command.reason.value,
            }
            for transfer_id, copy in self._copies.items()
        ]

    def check(self) -> None:
        blocks = sum(len(blocks) for _, blocks in self._recent.values())
        if blocks != self._recent_blocks or len(self._recent) > self._config.tracked_prefixes:
            raise InvariantError(
                f"{len(self._recent)} prompts of {blocks} blocks are remembered, {self._recent_blocks} counted"
            )

    def _may_go_on(self, worker: WorkerId) -> bool:
        under_way = sum(copy.flow.source == worker for copy in self._copies.values())
        return bool(self._leaving[worker].waiting) and under_way < COPIES_AT_ONCE

    def _go_on(self, now: float) -> list[Command]:
        """Begin copies until enough are under way, or enough has been looked at for now."""
        commands: list[Command] = []
        looks = LOOKS_AT_ONCE
        for worker in sorted(self._leaving):
            departure, staying = self._leaving[worker], self._staying_slots()
            while looks and self._may_go_on(worker):
                looks -= 1
                command = self._hand_on(worker, departure, departure.waiting.pop(), staying)
                if command is not None:
                    commands.append(command)
        self._due_s = now + PAUSE_S if any(self._may_go_on(worker) for worker in self._leaving) else math.inf
        return commands

    def _staying_slots(self) -> list[int]:
        """The index slots of everybody whose blocks can be had when all who leave have left."""
        specs = self._view.specs
        nodes = {spec.node for worker, spec in specs.items() if worker not in self._leaving}
        return [
            slot
            for slot, holder in self._view.holder_of_slot.items()
            if holder.tier is Tier.SHARED
            or (holder.owner in nodes if holder.tier is not Tier.DEVICE else holder.owner not in self._leaving)
        ]

    def _hand_on(
        self, worker: WorkerId, departure: Departure, prompt: tuple[BlockHash, ...], staying: list[int]
    ) -> TransferBlocks | None:
        confirmed = self._index.match(prompt).confirmed
        depth = int(confirmed[self._index.slot(Holder(worker, Tier.DEVICE))])
        blocks = prompt[:depth]
        if not blocks or blocks[-1] in departure.handed or int(confirmed[staying].max(initial=0)) >= depth:
            return None
        target, held = self._target(worker, departure, blocks, confirmed)
        if target is None:
            return None
        departure.given_blocks[target] = departure.given_blocks.get(target, 0) + depth - held
        departure.handed.update(dict.fromkeys(blocks, target))
        self._numbers += 1
        ends = Holder(worker, Tier.DEVICE), Holder(target, Tier.DEVICE)
        command = TransferBlocks(f"drain-{self._numbers}", *ends, blocks, TransferReason.DRAIN)
        self._copies[command.transfer_id] = HandedOn(command, Flow(worker, target))
        self._view.open_flow(Flow(worker, target))
        return command

    def _target(
        self, worker: WorkerId, departure: Departure, blocks: tuple[BlockHash, ...], confirmed: np.ndarray[Any, Any]
    ) -> tuple[WorkerId | None, int]:
        """Who lacks the least of the prefix and may be given it, and how much of it is there or on its way."""
        pool, model = self._view.prefill, self._view.specs[worker].model
        sent = next((depth for depth in range(len(blocks), 0, -1) if blocks[depth - 1] in departure.handed), 0)
        receiver = departure.handed[blocks[sent - 1]] if sent else None
        best: tuple[int, float, WorkerId] | None = None
        for other, row in pool.row.items():
            held = max(int(confirmed[pool.slot[row]]), sent if other == receiver else 0)
            given = departure.given_blocks.get(other, 0)
            fits = given + len(blocks) - held <= POOL_SHARE * float(pool.capacity_blocks[row])
            if pool.accepts[row] and pool.specs[other].model == model and fits and self._pays(worker, other, len(blocks), held):
                best = min(best or (0, math.inf, ""), (-held, given, other))
        return (None, 0) if best is None else (best[2], -best[0])

    def _pays(self, worker: WorkerId, target: WorkerId, blocks: int, held: int) -> bool:
        """Whether the copy is there sooner than the prefix could be computed."""
        tokens, held_tokens = blocks * self._block_tokens, held * self._block_tokens
        computed_s = self._view.prefill.prefill_s(target, tokens, held_tokens)
        return self._view.copy_s(worker, target, tokens - held_tokens) < computed_s

    def _end(self, transfer_id: str) -> bool:
        copy = self._copies.pop(transfer_id, None)
        if copy is not None:
            self._view.close_flow(copy.flow)
        return copy is not None
