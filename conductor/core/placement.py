"""The choice of a prefill and a decode worker: what a policy sees, what it answers, and the policies by name.

A policy is a function from a `Situation` to a `Choice`, or None when nobody can take the request. It sees the scheduler's
belief and decides; it changes nothing. Equal scores go to the lower worker id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from conductor.core.cluster_view import ClusterView
from conductor.core.config import SchedulerConfig
from conductor.core.storage_links import Relay
from conductor.core.tbt import DecodeChoice, DecodeNeed, choose_decode
from conductor.core.ttft import Candidates, PrefillTerms, Reuse
from conductor.core.types import Request, ReusePlan, Role, Tier, WorkerId
from conductor.core.worker_table import BoolArray, FloatArray, WorkerTable


class Situation(NamedTuple):
    """One request and everything that a policy may know.

    `sequence` counts decisions; `waiting` requests are in the central line, `backlog_s` seconds of work a prefill
    worker are before this one in it (reckoned for requests with a TTFT objective alone).
    """

    request: Request
    terms: PrefillTerms
    need: DecodeNeed
    view: ClusterView
    config: SchedulerConfig
    now: float
    sequence: int
    waited_s: float
    waiting: int
    prefill_eligible: BoolArray
    decode_eligible: BoolArray
    backlog_s: float = 0.0


class Choice(NamedTuple):
    """A policy's answer: the row of the prefill worker among `candidates`, and the decode worker."""

    candidates: Candidates
    row: int
    decode: DecodeChoice

    @property
    def prefill(self) -> WorkerId:
        return self.candidates.ids[self.row]


Policy: TypeAlias = Callable[[Situation], Choice | None]


def eligible(table: WorkerTable, request: Request, avoid: frozenset[WorkerId]) -> BoolArray:
    """Workers that take new work of the request's model and did not just fail it."""
    if not request.model and not avoid:
        return table.accepts
    usable = table.accepts & table.serving(request.model) if request.model else table.accepts.copy()
    usable[[table.row[worker] for worker in sorted(avoid) if worker in table]] = False
    return usable


def lowest(score: FloatArray, usable: BoolArray) -> int | None:
    """The first row with the lowest score among the usable ones."""
    row = int(score.argmin())
    if not usable[row]:
        row = int(np.where(usable, score, np.inf).argmin())
    return row if usable[row] else None


def decode_beside(situation: Situation, prefill: WorkerId) -> DecodeChoice | None:
    """The decode worker for a request that prefills on `prefill`: a coupled engine keeps it."""
    pool = situation.view.decode
    wanted = situation.decode_eligible
    if situation.view.specs[prefill].role is Role.COUPLED:
        wanted = np.zeros(len(pool), dtype=np.bool_)
        wanted[pool.row[prefill]] = True
    return choose_decode(pool, situation.need, wanted, situation.now)


def local_candidates(situation: Situation, score: FloatArray | None = None) -> Candidates:
    """Candidates that reuse what they hold themselves. Without a `score` it is the estimated TTFT."""
    terms = situation.terms
    prefill_s = terms.prefill_s(terms.local_tokens)
    nothing = np.zeros_like(prefill_s)
    reuse = Reuse(nothing, prefill_s, nothing)
    return candidates(terms, reuse, terms.queue_s + prefill_s if score is None else score)


def candidates(terms: PrefillTerms, reuse: Reuse, score: FloatArray) -> Candidates:
    pool = terms.pool
    return Candidates(
        ids=pool.ids,
        queue_s=terms.queue_s,
        local_tokens=terms.local_tokens,
        plans=reuse,
        score=score,
        calibrated=pool.calibrated_until_s >= terms.now,
        low_factor=pool.low_factor,
        high_factor=pool.high_factor,
        handover_s=terms.handover_s(),
        handover_groups=pool.handover_groups,
        trust=pool.trust.copy() if pool.distrusted else None,
    )


def finish(situation: Situation, table: Candidates, row: int | None) -> Choice | None:
    """Complete a prefill choice with its decode worker."""
    if row is None:
        return None
    decode = decode_beside(situation, table.ids[row])
    if decode is None:
        return None
    table.first_step_s = decode.tbt_s
    if situation.view.storage.busy:
        table.relay = relay_for(situation, table.reuse(row), row, decode.worker)
    return Choice(table, row, decode)


def relay_for(situation: Situation, reuse: ReusePlan, row: int, decode_worker: WorkerId) -> Relay | None:
    """Who reads what the prefill worker in `row` fetches from the shared store, if not that worker itself."""
    if reuse.source is None or reuse.source.tier is not Tier.SHARED:
        return None
    nbytes = reuse.fetched_tokens * float(situation.view.prefill.kv_bytes_per_token[row])
    blocks = reuse.reused_tokens // situation.config.block_tokens
    return situation.view.storage.relay(row, nbytes, blocks, decode_worker)


PolicyTable: TypeAlias = Mapping[str, Policy]
