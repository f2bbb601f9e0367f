"""The cost that NVIDIA Dynamo's KV router publishes in its design document, as a stand-in for what is run widely today.

In blocks, lowest first:

    prefill cost = max(0, active + incoming - device overlap - 0.75 host overlap - 0.25 disk overlap) + decode blocks

`active` is what the worker still has to prefill. Disaggregated pools are chosen one after the other, as its routers do: a
prefill worker by its prefill blocks, a decode worker by the blocks that it would hold; a coupled engine by the sum of both.
Lower-tier overlap is what a tier holds beyond the tiers above it. Defaults of the document: overlap credit 1 without decay,
load scale 1, no weight on active requests, no pulls, temperature 0 with equal costs drawn at random (here by a hash of seed and
request). Seconds, links and objectives play no part in it.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np

from conductor.core.placement import Choice, Situation, local_candidates
from conductor.core.tbt import decode_choice, fitting
from conductor.core.types import Role
from conductor.core.worker_table import BoolArray, FloatArray

HOST_CREDIT = 0.75
DISK_CREDIT = 0.25


def place_dynamo_cost(situation: Situation) -> Choice | None:
    usable = situation.prefill_eligible
    if not usable.any():
        return None
    cost = prefill_blocks(situation)
    decode_cost = decode_blocks(situation)
    coupled_rows = [situation.view.decode.row.get(worker) for worker in situation.view.prefill.ids]
    for row, decode_row in enumerate(coupled_rows):
        if decode_row is not None:
            cost[row] += decode_cost[decode_row]
    row = _draw(situation, cost, usable)
    table = local_candidates(situation, cost)
    coupled = situation.view.specs[table.ids[row]].role is Role.COUPLED
    decode_row = coupled_rows[row] if coupled else _decode_row(situation, decode_cost)
    if decode_row is None:
        return None
    pool = situation.view.decode
    table.first_step_s = float(pool.joined_step_s(situation.need.context_tokens)[decode_row])
    fits = bool(fitting(pool, situation.need)[decode_row])
    return Choice(table, row, decode_choice(pool, decode_row, table.first_step_s, fits, situation.now))


def prefill_blocks(situation: Situation) -> FloatArray:
    """Blocks to prefill on each worker once the request has joined, less what it need not compute."""
    terms, pool = situation.terms, situation.view.prefill
    host = np.maximum(terms.tier_tokens(pool.host_slot) - terms.local_tokens, 0.0)
    disk = np.maximum(terms.tier_tokens(pool.disk_slot) - terms.local_tokens - host, 0.0)
    tokens = pool.active_tokens + terms.prompt_tokens - terms.local_tokens - HOST_CREDIT * host - DISK_CREDIT * disk
    blocks: FloatArray = np.maximum(tokens / terms.block_tokens, 0.0)
    return blocks


def decode_blocks(situation: Situation) -> FloatArray:
    """Blocks that each decode worker would hold once the request has joined."""
    pool = situation.view.decode
    tokens = pool.active_context + pool.incoming_context + pool.foreign_context + situation.need.context_tokens
    blocks: FloatArray = tokens / situation.terms.block_tokens
    return blocks


def _decode_row(situation: Situation, cost: FloatArray) -> int | None:
    usable = situation.decode_eligible & fitting(situation.view.decode, situation.need)
    if not usable.any():
        usable = situation.decode_eligible
    return _draw(situation, cost, usable) if usable.any() else None


def _draw(situation: Situation, cost: FloatArray, usable: BoolArray) -> int:
    """One of the usable rows of lowest cost."""
    ranked = np.where(usable, cost, np.inf)
    lowest = np.flatnonzero(ranked == ranked.min())
    request = situation.request
    return int(lowest[crc32(f"{situation.config.seed}/{request.id}/{request.attempt}".encode()) % len(lowest)])
