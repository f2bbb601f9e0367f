"""What a worker that leaves hands on: prefixes of recent prompts that nobody would have without it.

The index knows who has a block and no block's parent, so the chains to look for are those of the prompts that were decided
last, the newest first. What a worker that leaves has of one of them beyond everybody who stays (other device pools, lower tiers
of hosts where somebody stays who reads them, the shared store) is copied to the worker that lacks the least of it, if it comes
there sooner than it could be computed. Nobody is given more than a share of its pool: that is the newest of what the other had,
against the oldest of its own. A few copies travel at a time, and a few prompts are looked at in one call, so that no decision
waits for a departure.

When nobody stays who reads a host's memory or disk, the worker that began to leave it last hands on what lies there too. It
brings that up into its own pool first, which evicts from there; so prompts of which the pool has all that there is go before.
"""

from __future__ import annotations

import math
from collections import deque
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
HOST_TIERS = (Tier.HOST, Tier.DISK)


@dataclass(slots=True)
class Departure:
    """A worker that leaves. `waiting` prompts are yet to be looked at, the newest last; of those in `below`, the newest first,
    its host's tiers have more than its pool. `handed` says who was given a block."""

    waiting: list[tuple[BlockHash, ...]]
    below: deque[tuple[BlockHash, ...]] = field(default_factory=deque)
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
        copy = self._end(event.transfer_id)
        if copy is None:
            return []
        onward = self._leaving.get(copy.flow.target)
        if onward is not None:  # it has begun to leave meanwhile
            onward.waiting.append(copy.command.blocks)
        return self._go_on(now)

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
        departure = self._leaving[worker]
        return bool(departure.waiting or departure.below) and under_way < COPIES_AT_ONCE

    def _go_on(self, now: float) -> list[Command]:
        """Begin copies until enough are under way, or enough has been looked at for now."""
        commands: list[Command] = []
        looks = LOOKS_AT_ONCE
        for worker in sorted(self._leaving):
            departure, kept = self._leaving[worker], self._kept_slots()
            given_up = self._given_up(worker, kept)
            while looks and self._may_go_on(worker):
                looks -= 1
                command = self._hand_on(worker, departure, given_up, kept)
                if command is not None:
                    commands.append(command)
        self._due_s = now + PAUSE_S if any(self._may_go_on(worker) for worker in self._leaving) else math.inf
        return commands

    def _kept_slots(self) -> list[int]:
        """The index slots of everybody whose blocks can be had when all who leave have left."""
        view = self._view
        staying = {
            view.holder(worker, tier)
            for worker, spec in view.specs.items()
            if worker not in self._leaving
            for tier in spec.capacity_blocks
        }
        return [slot for slot, holder in view.holder_of_slot.items() if holder.tier is Tier.SHARED or holder in staying]

    def _given_up(self, worker: WorkerId, kept: list[int]) -> dict[Holder, int]:
        """The tiers of its host, with their slots, whose blocks this worker hands on: those that nobody who stays reads, unless
        somebody has begun later to leave them too."""
        view = self._view
        last = {
            view.holder(leaving, tier): leaving
            for leaving in self._leaving
            for tier in HOST_TIERS
            if tier in view.specs[leaving].capacity_blocks
        }
        slots = view.holder_of_slot.items()
        return {holder: slot for slot, holder in slots if last.get(holder) == worker and slot not in kept}

    def _hand_on(
        self, worker: WorkerId, departure: Departure, given_up: dict[Holder, int], kept: list[int]
    ) -> TransferBlocks | None:
        """Look at the next prompt."""
        first_look = bool(departure.waiting)
        prompt = departure.waiting.pop() if first_look else departure.below.popleft()
        confirmed = self._index.match(prompt).confirmed
        source = Holder(worker, Tier.DEVICE)
        depth = pooled = int(confirmed[self._index.slot(source)])
        for holder, slot in given_up.items():
            if int(confirmed[slot]) > depth:
                source, depth = holder, int(confirmed[slot])
        blocks = prompt[:depth]
        if not blocks or blocks[-1] in departure.handed or int(confirmed[kept].max(initial=0)) >= depth:
            return None
        if first_look and depth > pooled:
            departure.below.append(prompt)
            return None
        brought_up_s = self._brought_up_s(worker, source, depth - pooled)
        target, held = self._target(worker, departure, blocks, confirmed, brought_up_s)
        if target is None:
            return None
        departure.given_blocks[target] = departure.given_blocks.get(target, 0) + depth - held
        departure.handed.update(dict.fromkeys(blocks, target))
        self._numbers += 1
        end = Holder(target, Tier.DEVICE)
        command = TransferBlocks(f"drain-{self._numbers}", source, end, blocks, TransferReason.DRAIN)
        self._copies[command.transfer_id] = HandedOn(command, Flow(worker, target))
        self._view.open_flow(Flow(worker, target))
        return command

    def _brought_up_s(self, worker: WorkerId, source: Holder, blocks: int) -> float:
        """Time to read so many blocks of a lower tier into the pool that they are copied from."""
        nbytes = blocks * self._block_tokens * self._view.specs[worker].profile.kv_bytes_per_token
        return nbytes / self._view.outbound_bytes_per_s(source) if blocks else 0.0

    def _target(
        self,
        worker: WorkerId,
        departure: Departure,
        blocks: tuple[BlockHash, ...],
        confirmed: np.ndarray[Any, Any],
        brought_up_s: float,
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
            if not fits or not pool.accepts[row] or pool.specs[other].model != model:
                continue
            if self._pays(worker, other, len(blocks), held, brought_up_s):
                best = min(best or (0, math.inf, ""), (-held, given, other))
        return (None, 0) if best is None else (best[2], -best[0])

    def _pays(self, worker: WorkerId, target: WorkerId, blocks: int, held: int, brought_up_s: float) -> bool:
        """Whether the copy is there sooner than the prefix could be computed."""
        tokens, held_tokens = blocks * self._block_tokens, held * self._block_tokens
        computed_s = self._view.prefill.prefill_s(target, tokens, held_tokens)
        return brought_up_s + self._view.copy_s(worker, target, tokens - held_tokens) < computed_s

    def _end(self, transfer_id: str) -> HandedOn | None:
        copy = self._copies.pop(transfer_id, None)
        if copy is not None:
            self._view.close_flow(copy.flow)
        return copy
