"""How much of a trace a cache could serve: every capacity of an LRU in one pass, other policies at chosen capacities.

One pool holds the whole trace's blocks. A request hits the blocks of its prompt from the first one on, up to the first
that the pool does not hold; then all its blocks are in. The last, partial block counts like any other (FAST'25 traces name it).

The LRU curve is exact (Mattson's stack distances): a block is hit at capacity C if it and every block before it in the
prompt lie among the C most recently used. Its depth is thus the largest distance along the prefix so far. The other
policies have no such property and are simulated at each capacity.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from sortedcontainers import SortedList

from traces.schema import TraceRequest

MAX_DISTINCT_BLOCKS = 4_000_000  # about 1 GiB of bookkeeping
TICK_BITS = 48
POSITION_BITS = 32
LAST_POSITION = (1 << POSITION_BITS) - 1
RankOf: TypeAlias = Callable[[int, int, int], int]


def lfu_rank(uses: int, position: int, tick: int) -> int:
    """Least used while cached, then least recently used."""
    return uses << TICK_BITS | tick


def length_aware_rank(uses: int, position: int, tick: int) -> int:
    """Least used while cached, then latest in its prompt, then least recently used."""
    return (uses << POSITION_BITS | LAST_POSITION - position) << TICK_BITS | tick


# Rank of a block from its uses while cached, its position in the prompt and the time of its last use; the lowest goes
# first. Every use raises a block's rank.
EVICTION_RANKS: Mapping[str, RankOf] = {"lfu": lfu_rank, "length_aware": length_aware_rank}


class TooManyBlocks(ValueError):
    """The trace has more distinct blocks than the analysis may remember."""


@dataclass(slots=True)
class Hits:
    """The hits of an infinite cache, one entry a block, in order: what each would need to be a hit of a lesser one."""

    depth_blocks: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    idle_s: array[float] = field(default_factory=lambda: array("d"))
    traffic_class: array[int] = field(default_factory=lambda: array("q"))


class ReuseAnalysis:
    """Feed it requests in order; it knows the hits that an LRU of any capacity would have had."""

    def __init__(self) -> None:
        self._last_tick: dict[int, int] = {}
        self._last_time_s: dict[int, float] = {}
        self._ticks: SortedList[int] = SortedList()
        self._tick = 0
        self._classes: dict[str, int] = {}
        self.hits = Hits()
        self.blocks = 0
        self.tokens = 0

    @property
    def distinct_blocks(self) -> int:
        return len(self._last_tick)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the traffic classes, by the number that `hits.traffic_class` gives."""
        return tuple(self._classes)

    def add(self, request: TraceRequest) -> int:
        """Account for one request; returns the tokens that an infinite cache would have reused."""
        name = request.traffic_class or "all"
        number = self._classes.setdefault(name, len(self._classes))
        depth, idle_s, hit_blocks = 0, 0.0, 0
        for position, block in enumerate(request.hash_ids):
            if block in self._last_tick and hit_blocks == position:
                depth = max(depth, len(self._ticks) - self._ticks.bisect_left(self._last_tick[block]))
                idle_s = max(idle_s, request.timestamp_s - self._last_time_s[block])
                hit_blocks += 1
                self._record_hit(request, position, (depth, idle_s, number))
            self._touch(block, request.timestamp_s)
        self.blocks += len(request.hash_ids)
        self.tokens += request.input_tokens
        if self.distinct_blocks > MAX_DISTINCT_BLOCKS:
            raise TooManyBlocks(f"distinct blocks exceed {MAX_DISTINCT_BLOCKS}; allowed: fewer (take part of it with --limit)")
        return request.tokens_of(hit_blocks)

    def _record_hit(self, request: TraceRequest, position: int, needs: tuple[int, float, int]) -> None:
        depth, idle_s, number = needs
        self.hits.depth_blocks.append(depth)
        self.hits.tokens.append(request.tokens_of(position + 1) - request.tokens_of(position))
        self.hits.idle_s.append(idle_s)
        self.hits.traffic_class.append(number)

    def _touch(self, block: int, time_s: float) -> None:
        if block in self._last_tick:
            self._ticks.remove(self._last_tick[block])
        self._tick += 1
        self._ticks.add(self._tick)
        self._last_tick[block] = self._tick
        self._last_time_s[block] = time_s

    def lru_hit_ratios(self, capacities_blocks: tuple[int, ...]) -> list[tuple[float, float]]:
        """For each capacity the hit ratio in blocks and in tokens."""
        depths = np.frombuffer(self.hits.depth_blocks, dtype=np.int64)
        order = np.argsort(depths, kind="stable")
        tokens = np.concatenate(([0], np.cumsum(np.frombuffer(self.hits.tokens, dtype=np.int64)[order])))
        counts = np.searchsorted(depths[order], capacities_blocks, side="right")
        return [(int(count) / self.blocks, int(tokens[count]) / self.tokens) for count in counts]


class RankedCache:
    """A pool of `capacity_blocks` that evicts the block of the lowest rank; counts the hits of a trace.

    The heap holds each block once, at a rank that it had: since ranks only rise, a stale entry is put back where it belongs
    when it comes up.
    """

    def __init__(self, capacity_blocks: int, rank: RankOf) -> None:
        self._capacity_blocks = capacity_blocks
        self._rank_of = rank
        self._rank: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._tick = 0
        self.blocks = 0
        self.hit_blocks = 0

    @property
    def hit_ratio(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    def add(self, request: TraceRequest) -> None:
        ranks, all_uses, rank_of = self._rank, self._uses, self._rank_of
        hit_blocks = 0
        for position, block in enumerate(request.hash_ids):
            self._tick += 1
            uses = all_uses.get(block, 0) + 1
            rank = rank_of(uses, position, self._tick)
            if uses > 1:
                hit_blocks += hit_blocks == position
            else:
                if len(ranks) >= self._capacity_blocks:
                    self._evict()
                heapq.heappush(self._heap, (rank, block))
            all_uses[block] = uses
            ranks[block] = rank
        self.hit_blocks += hit_blocks
        self.blocks += len(request.hash_ids)

    def _evict(self) -> None:
        while True:
            rank, block = self._heap[0]
            held = self._rank[block]
            if held == rank:
                heapq.heappop(self._heap)
                del self._rank[block], self._uses[block]
                return
            heapq.heapreplace(self._heap, (held, block))
