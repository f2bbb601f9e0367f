"""Placement policies to compare with: random, round robin, least loaded, and local cache-aware.

These are the baselines of Mooncake's scheduling experiment (FAST'25, figure 5). None of them moves KV between prefill workers.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np

from conductor.core.placement import Choice, Situation, finish, local_candidates, lowest
from conductor.core.tbt import decode_choice, fitting
from conductor.core.types import Role


def place_random(situation: Situation) -> Choice | None:
    """A worker drawn by a hash of the configured seed and the request: random over requests, the same in every run."""
    request = situation.request
    draw = crc32(f"{situation.config.seed}/{request.id}/{request.attempt}".encode())
    return _place_nth(situation, draw, draw // 65_537)


def place_round_robin(situation: Situation) -> Choice | None:
    return _place_nth(situation, situation.sequence, situation.sequence)


def place_least_loaded(situation: Situation) -> Choice | None:
    """The shortest queue, whatever is cached where."""
    table = local_candidates(situation, situation.terms.queue_s)
    return finish(situation, table, lowest(table.score, situation.prefill_eligible))


def place_local_cache_aware(situation: Situation) -> Choice | None:
    """The lowest estimated TTFT, each worker reusing what it holds itself."""
    table = local_candidates(situation)
    return finish(situation, table, lowest(table.score, situation.prefill_eligible))


def _place_nth(situation: Situation, prefill_number: int, decode_number: int) -> Choice | None:
    prefill_rows = np.flatnonzero(situation.prefill_eligible)
    decode_rows = np.flatnonzero(situation.decode_eligible)
    if not len(prefill_rows) or not len(decode_rows):
        return None
    row = int(prefill_rows[prefill_number % len(prefill_rows)])
    table = local_candidates(situation)
    pool = situation.view.decode
    decode_row = int(decode_rows[decode_number % len(decode_rows)])
    if situation.view.specs[table.ids[row]].role is Role.COUPLED:
        decode_row = pool.row[table.ids[row]]
    tbt_s = float(pool.joined_step_s(situation.need.context_tokens)[decode_row])
    table.first_step_s = tbt_s
    fits = bool(fitting(pool, situation.need)[decode_row])
    return Choice(table, row, decode_choice(pool, decode_row, tbt_s, fits, situation.now))
