"""Load of the two pools, as the paper's overload control means it: predicted time over objective, 1 being just met.

    load of prefill pool = mean over workers of (queue + share of what is before it in the central line) / TTFT objective
    load of decode pool  = mean over workers of decode step after joining / TBT objective

`decode_load_ahead` is the decode load of the moment at which the request will have been prefilled, rather than of now: early
rejection by the present load makes the two pools swing against each other. (Mooncake arXiv v3, sections 7.1 to 7.4.)
"""

from __future__ import annotations

from conductor.core.decode_pool import DecodePool
from conductor.core.decode_timeline import DecodeTimeline
from conductor.core.placement import Situation
from conductor.core.worker_table import mean_of


def prefill_load(situation: Situation, ttft_objective_s: float) -> float:
    """How long a request that arrives at this moment waits, on average, for a prefill worker."""
    return (mean_of(situation.terms.queue_s) + situation.backlog_s) / ttft_objective_s


def decode_load(situation: Situation, tbt_objective_s: float) -> float:
    pool = situation.view.decode
    return mean_of(pool.joined_step_s(situation.need.context_tokens)) / tbt_objective_s


def decode_load_ahead(situation: Situation, timeline: DecodeTimeline, prefill_end_s: float, tbt_objective_s: float) -> float:
    """The decode load when the prefill ends at `prefill_end_s`, this request included."""
    pool = situation.view.decode
    crowd = timeline.at(prefill_end_s)
    batch = (crowd.requests + int(pool.foreign_batch.sum()) + 1) / len(pool)
    context = (crowd.context_tokens + int(pool.foreign_context.sum()) + situation.need.context_tokens) / len(pool)
    return mean_step_s(pool, batch, context) / tbt_objective_s


def mean_step_s(pool: DecodePool, batch: float, context_tokens: float) -> float:
    """A step when every worker has `batch` sequences that hold `context_tokens`, averaged over the workers."""
    steps_s = (pool.base_s + pool.per_sequence_s * batch + pool.per_context_token_s * context_tokens) * pool.correction
    return mean_of(steps_s)
