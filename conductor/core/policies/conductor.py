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

from conductor.core.placement import Choice, Situation, candidates, finish, lowest
from conductor.core.ttft import PrefillTerms, Reuse, overlapped_s
from conductor.core.types import Holder, Tier
from conductor.core.worker_table import lowest_of, some


def place_conductor(situation: Situation) -> Choice | None:
    terms, weights = situation.terms, situation.config.weights
    pool = situation.view.prefill
    reuse = cheapest_reuse(terms, situation.config.allow_pull)
    work_s = reuse.transfer_s + reuse.prefill_s
    score = terms.queue_s + work_s
    delay = weights.delay * situation.waiting / len(pool)
    score += (delay + weights.copy) * (work_s - lowest_of(work_s))
    score += weights.spread_s * pool.churn_share()
    table = candidates(terms, reuse, score)
    if table.handover_s is not None:
        score += table.handover_s
    return finish(situation, table, lowest(score, situation.prefill_eligible))


def cheapest_reuse(terms: PrefillTerms, allow_pull: bool) -> Reuse:
    """For each worker the fastest of computing, pulling from the best holder and restoring from a lower tier."""
    if terms.cheapest is None:
        local, best = terms.local_tokens, terms.best
        if allow_pull and best is not None and lowest_of(local) < terms.best_tokens:
            reuse = _pulled_if_faster(terms, best)
        else:
            nothing = np.zeros_like(local)
            reuse = Reuse(nothing, terms.prefill_s(local), nothing)
        terms.cheapest = _restored_if_faster(reuse, terms) if terms.pool.lower_holders else reuse
    return terms.cheapest


def least_work_s(terms: PrefillTerms, allow_pull: bool) -> float:
    """Transfer and prefill time of the request where it is least."""
    reuse = cheapest_reuse(terms, allow_pull)
    return lowest_of(reuse.transfer_s + reuse.prefill_s)


def _pulled_if_faster(terms: PrefillTerms, best: Holder) -> Reuse:
    """Let each worker pull what the best holder has beyond its own device pool."""
    local = terms.local_tokens
    reused = np.maximum(local, terms.best_tokens)
    missing = reused - local
    computed_s, prefill_s = terms.prefill_s(local), terms.prefill_s(reused)
    pull_tokens, pull_s = missing.copy(), terms.transfer_s(missing)
    transfer_s = overlapped_s(pull_s, prefill_s, terms.pool)
    stays = ~((prefill_s + transfer_s < computed_s) & (missing > 0.0))
    np.putmask(prefill_s, stays, computed_s)
    transfer_s[stays] = missing[stays] = 0.0
    return Reuse(transfer_s, prefill_s, missing, sources=(best,), pull_tokens=pull_tokens, pull_s=pull_s)


def _restored_if_faster(reuse: Reuse, terms: PrefillTerms) -> Reuse:
    """Let each worker restore what host, disk or shared store hold beyond its device pool."""
    pool, rows = terms.pool, np.arange(len(terms.pool), dtype=np.float64)
    codes, lower = np.zeros_like(rows), len(reuse.sources)
    sources = (*reuse.sources, *pool.lower_holders)
    tiers = ((Tier.HOST, pool.host_slot), (Tier.DISK, pool.disk_slot), (Tier.SHARED, pool.shared_slot))
    for number, (tier, slots) in enumerate(tiers):
        missing = np.maximum(terms.tier_tokens(slots) - terms.local_tokens, 0.0)
        if not some(missing > 0.0):
            continue
        prefill_s = terms.prefill_s(terms.local_tokens + missing)
        transfer_s = overlapped_s(terms.restore_s(missing, tier), prefill_s, pool)
        faster = (prefill_s + transfer_s < reuse.prefill_s + reuse.transfer_s) & (missing > 0.0)
        codes = np.where(faster, lower + number * len(pool) + rows, codes)
        reuse = Reuse(
            transfer_s=np.where(faster, transfer_s, reuse.transfer_s),
            prefill_s=np.where(faster, prefill_s, reuse.prefill_s),
            fetched_tokens=np.where(faster, missing, reuse.fetched_tokens),
            sources=sources,
            source_code=codes,
        )
    return reuse
