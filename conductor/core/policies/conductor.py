"""The default policy: the lowest cost to this request and to the requests behind it.

For each prefill worker the cheapest way to the prompt's KV is taken: compute what the worker does not hold, pull the difference
from the best holder, or restore it from a lower tier. The score is then

    queue + work + (delay + copy) * (work - least work on any worker) + spread * share of the cache churn

in seconds. `work` is transfer plus prefill time. Work that another worker would not have had to do is charged once more for
everybody who waits behind it (`delay`: weight times requests waiting per worker) and for the cache space that a second copy
of the prefix takes from others (`copy`). Cold requests go where the cache churns least, so that every worker keeps prefixes
for equally long (`spread`). Sessions stay where their prefix lies unless waiting there costs more than the extra work.
"""

from __future__ import annotations

import numpy as np

from conductor.core.placement import Choice, Situation, finish, lowest
from conductor.core.ttft import Candidates, PrefillTerms, overlapped_s
from conductor.core.worker_table import FloatArray


def place_conductor(situation: Situation) -> Choice | None:
    table = cheapest_reuse(situation.terms, situation.config.allow_pull)
    usable = situation.prefill_eligible
    if not usable.any():
        return None
    weights = situation.config.weights
    pool = situation.view.prefill
    work_s = table.transfer_s + table.prefill_s
    least_s = float(work_s.min())
    delay = weights.delay * situation.waiting / len(pool)
    score = table.queue_s + work_s
    score += (delay + weights.copy) * (work_s - least_s)
    score += weights.spread_s * pool.churn_share()
    if table.handover_s is not None:
        score += table.handover_s
    table.score = score
    return finish(situation, table, lowest(score, usable))


def cheapest_reuse(terms: PrefillTerms, allow_pull: bool) -> Candidates:
    """For each worker the fastest of computing, pulling from the best holder and restoring from a lower tier."""
    pool, local = terms.pool, terms.local_tokens
    prefill_s = terms.prefill_s(local)
    transfer_s = np.zeros_like(prefill_s)
    table = Candidates(
        ids=pool.ids,
        queue_s=terms.queue_s,
        transfer_s=transfer_s,
        prefill_s=prefill_s,
        local_tokens=local,
        fetched_tokens=transfer_s.copy(),
        sources=(terms.best,),
        source_code=transfer_s.copy(),
        score=prefill_s,
        calibrated=pool.calibrated_until_s >= terms.now,
        low_factor=pool.low_factor,
        high_factor=pool.high_factor,
        handover_s=terms.handover_s(),
        handover_groups=pool.handover_groups,
        trust=pool.trust.copy() if pool.distrusted else None,
    )
    if allow_pull and terms.best is not None and bool((local < terms.best_tokens).any()):
        missing = np.maximum(terms.best_tokens - local, 0.0)
        table.pull_tokens, table.pull_s = missing, terms.pull_s(missing)
        _take_if_faster(table, terms, missing, table.pull_s, 0.0)
    if pool.lower_holders:
        _restore_if_faster(table, terms)
    return table


def _restore_if_faster(table: Candidates, terms: PrefillTerms) -> None:
    """Let each worker restore what host, disk or shared store hold beyond its device pool."""
    pool, rows = terms.pool, np.arange(len(terms.pool), dtype=np.float64)
    tiers = (
        (pool.host_slot, pool.host_bytes_per_s),
        (pool.disk_slot, pool.disk_bytes_per_s),
        (pool.shared_slot, pool.shared_bytes_per_s),
    )
    for number, (slots, bytes_per_s) in enumerate(tiers):
        missing = terms.tier_tokens(slots) - terms.local_tokens
        if not (missing > 0.0).any():
            continue
        np.maximum(missing, 0.0, out=missing)
        table.sources = (terms.best, *pool.lower_holders)
        _take_if_faster(table, terms, missing, terms.restore_s(missing, bytes_per_s), 1.0 + number * len(pool) + rows)


def _take_if_faster(
    table: Candidates, terms: PrefillTerms, tokens: FloatArray, bring_s: FloatArray, source_code: FloatArray | float
) -> None:
    """Let each worker fetch `tokens` in `bring_s` seconds if that beats what `table` has for it."""
    pool = terms.pool
    prefill_s = terms.prefill_s(terms.local_tokens + tokens)
    transfer_s = overlapped_s(bring_s, prefill_s, pool.layer_groups)
    faster = (prefill_s + transfer_s < table.prefill_s + table.transfer_s) & (tokens > 0.0)
    np.copyto(table.prefill_s, prefill_s, where=faster)
    np.copyto(table.transfer_s, transfer_s, where=faster)
    np.copyto(table.fetched_tokens, tokens, where=faster)
    np.copyto(table.source_code, source_code, where=faster)


def least_work_s(situation: Situation) -> float:
    """Transfer and prefill time of the request where it is least."""
    table = cheapest_reuse(situation.terms, situation.config.allow_pull)
    return float((table.prefill_s + table.transfer_s).min())
