"""Predicted time between tokens, and the choice of a decode worker by it (SelectDecodingInstance of Algorithm 1).

A decode step takes `base + per_sequence * batch + per_context_token * context`. What matters to a request is the step after
it has joined, with everything already promised to that worker: what decodes there, what is placed there and still prefills,
and what others run there. A worker is chosen only if its KV capacity holds the prompt and the expected output; if none
does, the least reserved one is named and said not to fit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from conductor.core.decode_pool import DecodePool
from conductor.core.types import WorkerId
from conductor.core.worker_table import BoolArray


class DecodeNeed(NamedTuple):
    """What a request will want of its decode worker: blocks to reserve, context tokens when it joins, and expected output."""

    blocks: int
    context_tokens: int
    output_tokens: int = 1


class DecodeChoice(NamedTuple):
    worker: WorkerId
    tbt_s: float
    calibrated: bool
    fits: bool
    low_s: float
    high_s: float


def fitting(pool: DecodePool, need: DecodeNeed) -> BoolArray:
    """Workers that have room for the request beside everything already reserved."""
    room: BoolArray = pool.reserved_blocks + float(need.blocks) <= pool.capacity_blocks
    room &= pool.promised_batch < pool.max_batch
    return room


def choose_decode(pool: DecodePool, need: DecodeNeed, eligible: BoolArray, now: float) -> DecodeChoice | None:
    """The fitting worker with the shortest step after joining; None when no worker is eligible."""
    if not len(pool):
        return None
    seconds = pool.joined_step_s(need.context_tokens)
    usable = fitting(pool, need)
    usable &= eligible
    row = int(seconds.argmin())
    if not usable[row]:
        row = int(np.where(usable, seconds, np.inf).argmin())
    fits = bool(usable[row])
    if not fits:
        if not eligible.any():
            return None
        row = int(np.where(eligible, pool.reserved_blocks / pool.capacity_blocks, np.inf).argmin())
    return decode_choice(pool, row, float(seconds[row]), fits, now)


def decode_choice(pool: DecodePool, row: int, tbt_s: float, fits: bool, now: float) -> DecodeChoice:
    return DecodeChoice(
        worker=pool.ids[row],
        tbt_s=tbt_s,
        calibrated=bool(pool.calibrated_until_s[row] >= now),
        fits=fits,
        low_s=tbt_s * float(pool.low_factor[row]),
        high_s=tbt_s * float(pool.high_factor[row]),
    )
