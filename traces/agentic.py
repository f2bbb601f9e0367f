"""The agentic workload of DualPath (arXiv 2602.21548, table 2): long trajectories of many short turns over a growing context.

A trajectory starts from a first prompt and appends a tool's answer and its own output in every turn, until it has reached
its total length. The paper's figures are means over trajectories. Their product does not close (60 turns of 608 + 148
tokens are more than the total of 28,639), which tells how uneven trajectories are: with the first prompt that mean context
and total imply, the arithmetic mean of the tokens a turn is about twice the harmonic one. A log-normal factor per
trajectory, with the logarithm of that ratio for its variance, gives every published mean at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import accumulate
from statistics import NormalDist

from traces.laws import poisson_times_s, strata
from traces.schema import MOONCAKE_BLOCK_TOKENS, TraceRequest

SHARED_BLOCKS = 4  # tools and instructions that every trajectory begins with
TURN_PAUSE_S = 12.0  # mean from one turn to the next
SHORTEST_PAUSE_S = 4.0  # a turn follows when its predecessor is answered: no sooner than the TTFT objective of the paper
MAX_SIGMA = 2.0
MAX_FACTOR = 6.0


@dataclass(frozen=True, slots=True)
class AgenticWorkload:
    """A row of table 2. `context_tokens` is the mean context of a trajectory's turns."""

    name: str
    max_tokens: int
    turns: int
    append_tokens: int
    output_tokens: int
    total_tokens: int
    context_tokens: int
    trajectories: int = 500
    trajectories_per_s: float = 0.2

    @property
    def first_tokens(self) -> int:
        """First prompt of a trajectory: context grows evenly from it to the total."""
        return 2 * self.context_tokens - self.total_tokens

    @property
    def step_tokens(self) -> int:
        return self.append_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class _Plan:
    """One trajectory before its blocks are named."""

    number: int
    start_s: float
    turns: int
    factor: float
    total_tokens: int


def agentic(workload: AgenticWorkload, requests: int, seed: int) -> Iterator[TraceRequest]:
    """`requests` turns in order of time; the same seed gives the same ones."""
    rng = random.Random(seed)
    plans = _plans(workload, requests, rng)
    seeds = [rng.getrandbits(64) for _ in plans]
    ids_each = [plan.total_tokens // MOONCAKE_BLOCK_TOKENS + plan.turns for plan in plans]
    first_ids = accumulate(ids_each, initial=SHARED_BLOCKS)
    runs = [
        _trajectory(workload, plan, first_id, random.Random(own))
        for plan, first_id, own in zip(plans, first_ids, seeds, strict=False)
    ]
    yield from merge(*runs, key=lambda request: request.timestamp_s)


def _plans(workload: AgenticWorkload, requests: int, rng: random.Random) -> list[_Plan]:
    """Trajectories whose turns add up to `requests`."""
    count = max(1, round(requests / workload.turns))
    starts_s = poisson_times_s(count, workload.trajectories_per_s, rng)
    spread_tokens = workload.max_tokens - workload.total_tokens
    totals = [workload.total_tokens + round((2 * u - 1) * spread_tokens) for u in strata(count, rng)]
    normals = [NormalDist().inv_cdf(u) for u in strata(count, rng)]
    factors = _factors(normals, _fitting_sigma(workload, normals, totals, requests))
    turns = _adding_up(_turns(workload, factors, totals), requests)
    rows = zip(starts_s, turns, factors, totals, strict=True)
    return [_Plan(number, *row) for number, row in enumerate(rows) if row[1] > 0]


def _factors(normals: list[float], sigma: float) -> list[float]:
    """Log-normal factors of mean 1, none far above the others."""
    raw = [min(math.exp(sigma * each), MAX_FACTOR) for each in normals]
    return [each * len(raw) / sum(raw) for each in raw]


def _turns(workload: AgenticWorkload, factors: list[float], totals: list[int]) -> list[int]:
    """Turns in which each trajectory grows from the first prompt to its total."""
    return [
        1 + max(1, round((total - workload.first_tokens - factor * workload.output_tokens) / (factor * workload.step_tokens)))
        for factor, total in zip(factors, totals, strict=True)
    ]


def _fitting_sigma(workload: AgenticWorkload, normals: list[float], totals: list[int], requests: int) -> float:
    """The unevenness at which the trajectories have `requests` turns together: turns grow with it."""
    low, high = 0.0, MAX_SIGMA
    for _ in range(40):
        middle = (low + high) / 2
        if sum(_turns(workload, _factors(normals, middle), totals)) < requests:
            low = middle
        else:
            high = middle
    return low


def _adding_up(turns: list[int], requests: int) -> list[int]:
    """`turns` changed as evenly as can be, the longest first, so that they add up to `requests`."""
    longest_first = sorted(range(len(turns)), key=lambda number: (-turns[number], number))
    each, rest = divmod(requests - sum(turns), len(turns))
    changed = list(turns)
    for place, number in enumerate(longest_first):
        changed[number] += each + (place < rest)
    while min(changed) < 0:
        changed[changed.index(max(changed))] -= 1
        changed[changed.index(min(changed))] += 1
    return changed


def _trajectory(workload: AgenticWorkload, plan: _Plan, first_id: int, rng: random.Random) -> Iterator[TraceRequest]:
    """The turns of one trajectory: contexts evenly spaced from the first prompt to the total.

    Full blocks keep their ids from turn to turn; a last partial block has an id that no other prompt has.
    """
    outputs = max(1, round(workload.output_tokens * plan.factor))
    tail_id = first_id + plan.total_tokens // MOONCAKE_BLOCK_TOKENS
    growth = (plan.total_tokens - workload.first_tokens - outputs) / max(1, plan.turns - 1)
    now_s = plan.start_s
    for turn in range(plan.turns):
        input_tokens = workload.first_tokens + round(turn * growth)
        own_full = input_tokens // MOONCAKE_BLOCK_TOKENS - SHARED_BLOCKS
        tail = (tail_id + turn,) if input_tokens % MOONCAKE_BLOCK_TOKENS else ()
        yield TraceRequest(
            timestamp_s=round(now_s, 3),
            input_tokens=input_tokens,
            output_tokens=outputs,
            hash_ids=(*range(SHARED_BLOCKS), *range(first_id, first_id + own_full), *tail),
            session=str(plan.number),
            turn=turn + 1,
            traffic_class="agent",
        )
        now_s += SHORTEST_PAUSE_S + rng.expovariate(1 / (TURN_PAUSE_S - SHORTEST_PAUSE_S))
