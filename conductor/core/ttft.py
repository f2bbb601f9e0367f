"""The place where time to first token is estimated, for every prefill worker at once.

    TTFT = queue time + transfer time + prefill time(prompt length, reused prefix length)

Queue time comes from the pool's belief (`prefill_pool.py`). Prefill time is the fitted form `c0 + c1 (n-p) + c2 (n^2-p^2)`,
c0 paid once a chunk, times an online correction; a worker that is a pipeline computes several chunks at once
(`cost_profile.py`). Transfer time is bytes over what the path has left (the source's NIC, the target's NIC, the tier, each
shared with the transfers in flight there) plus a latency; between workers less what windows leave behind
(`CostProfile.moved_bytes`). Transfer and compute overlap layer group by layer group:
with G groups a request pays (T + P) / G + (1 - 1/G) max(T, P), which is T + P for one group and goes to max(T, P) for many
(Mooncake v3, section 5.2). What `transfer_s` reports is what the transfer adds to the prefill time.

Where the first token leaves the decode worker, the hand-over of the whole prompt's KV comes on top, serial or overlapped by
the same form, and one decode step. It is reckoned at the links' full speed: it lies in the future, and what fills them at
the time of the decision will mostly have arrived by then. It is part of `transfer_s`, and keeps no prefill worker busy.

An estimate carries an interval from the residuals and says whether recent observations support it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from conductor.core.cluster_view import ClusterView
from conductor.core.prefill_pool import PrefillPool
from conductor.core.prefix_index import PrefixMatch
from conductor.core.storage_links import Relay
from conductor.core.types import Candidate, Holder, Request, ReusePlan, Tier, TTFTEstimate, WorkerId
from conductor.core.worker_table import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Reuse:
    """How each prefill worker would come by the prompt's KV: seconds to bring and to compute it, and what is brought.

    `fetched_tokens` come from the one of `sources` that `source_code` names; without codes all come from the first.
    """

    transfer_s: FloatArray
    prefill_s: FloatArray
    fetched_tokens: FloatArray
    sources: tuple[Holder, ...] = ()
    source_code: FloatArray | None = None
    pull_tokens: FloatArray | None = None  # what the best holder has beyond each worker; None where nobody has more
    pull_s: FloatArray | None = None  # how long bringing that takes by itself, whether or not it is brought


@dataclass(slots=True)
class PrefillTerms:
    """The parts that an estimate of one request is made of. Arrays have one entry a prefill worker.

    Somebody has reported `best_tokens` leading tokens of the prompt, nobody more; `local_tokens` lie, or are about to, in a
    worker's own device pool. `believed` is how many blocks each index slot has, by reports and as far as these are trusted.
    Only `now` and `queue_s` change while nothing but time passes. None of the arrays may be written to: they are shared with
    the pool, with decisions and their records.
    """

    view: ClusterView
    now: float
    prompt_tokens: int
    queue_s: FloatArray
    local_tokens: FloatArray
    best_tokens: float
    match: PrefixMatch
    believed: npt.NDArray[np.int32]
    block_tokens: int
    cheapest: Reuse | None = None  # once somebody has asked for it
    _best: tuple[Holder, float] | None = None

    @property
    def pool(self) -> PrefillPool:
        return self.view.prefill

    @property
    def best(self) -> Holder | None:
        """Of those that have reported the most, the one to fetch from."""
        return self._source()[0] if self.best_tokens else None

    def _source(self) -> tuple[Holder, float]:
        if self._best is None:
            self._best = _best_holder(self.believed, int(self.best_tokens) // self.block_tokens, self.view)
        return self._best

    def claimed_tokens(self, row: int) -> int:
        """Reusable leading tokens that the worker itself has reported to hold."""
        blocks = min(int(self.match.confirmed[self.pool.slot[row]]), (self.prompt_tokens - 1) // self.block_tokens)
        return blocks * self.block_tokens

    def tier_tokens(self, slots: IntArray) -> FloatArray:
        """Reusable leading tokens of the prompt in a lower tier, whose index slot `slots` names for each worker."""
        blocks = np.minimum(self.match.depths[slots], (self.prompt_tokens - 1) // self.block_tokens)
        tokens: FloatArray = blocks * float(self.block_tokens)
        return tokens

    def prefill_s(self, reused_tokens: FloatArray) -> FloatArray:
        """Predicted time to compute the rest of the prompt."""
        pool = self.pool
        new_tokens: FloatArray = self.prompt_tokens - reused_tokens
        seconds: FloatArray = self.prompt_tokens + reused_tokens
        seconds *= pool.per_token2_s
        seconds += pool.per_token_s
        seconds *= new_tokens
        seconds += np.ceil(new_tokens / pool.chunk_tokens) * pool.base_s if pool.chunked else pool.base_s
        if pool.staged:
            seconds *= pool.flow_share
            seconds += (1.0 - pool.flow_share) * self._last_step_s(new_tokens)
        seconds *= pool.correction
        return seconds

    def _last_step_s(self, new_tokens: FloatArray) -> FloatArray:
        """Predicted time of the last step of so many new tokens, by itself."""
        pool = self.pool
        last_tokens = new_tokens - np.maximum(np.ceil(new_tokens / pool.chunk_tokens) - 1.0, 0.0) * pool.chunk_tokens
        seconds: FloatArray = pool.per_token2_s * (2.0 * self.prompt_tokens - last_tokens)
        seconds += pool.per_token_s
        seconds *= last_tokens
        seconds += pool.base_s
        return seconds

    def pull_s(self, tokens: FloatArray) -> FloatArray:
        """Time to bring `tokens` from the best holder, compute aside. Zero tokens take no time."""
        seconds = self.transfer_s(tokens)
        seconds[tokens <= 0.0] = 0.0
        return seconds

    def transfer_s(self, tokens: FloatArray) -> FloatArray:
        """The same where there is something to bring, and anything where there is not."""
        pool = self.pool
        source, bytes_per_s = self._source() if self.best_tokens else (None, math.inf)
        if source is not None and source.tier is Tier.SHARED:
            return self.view.storage.read_s(tokens * pool.kv_bytes_per_token)
        links = None if source is None else self.view.links.outbound(source.owner)
        seconds: FloatArray = tokens * pool.kv_bytes_per_token
        if pool.windowed:
            seconds -= np.maximum(tokens - pool.window_tokens, 0.0) * pool.window_bytes_per_token
        seconds /= np.minimum(
            pool.inbound_bytes_per_s() if links is None else pool.inbound_over(links.bytes_per_s), bytes_per_s
        )
        seconds += pool.latency_s if links is None else links.latency_s
        return seconds

    def handover_s(self) -> FloatArray | None:
        """Time to send the whole prompt's KV to a decode worker; None where the first token does not wait for it."""
        pool = self.pool
        if not pool.awaits_handover:
            return None
        seconds: FloatArray = self.prompt_tokens * pool.handover_s_per_token
        if pool.windowed:
            seconds -= np.maximum(self.prompt_tokens - pool.window_tokens, 0.0) * pool.handover_window_s_per_token
        seconds += pool.handover_latency_s
        return seconds

    def restore_s(self, tokens: FloatArray, tier: Tier) -> FloatArray:
        """Time to bring `tokens` up from a lower tier of the worker's own node, or from the shared store."""
        pool = self.pool
        seconds: FloatArray = tokens * pool.kv_bytes_per_token
        if tier is Tier.SHARED:
            seconds = self.view.storage.read_s(seconds)
        else:
            seconds *= pool.flows_in + 1.0
            seconds /= pool.host_bytes_per_s if tier is Tier.HOST else pool.disk_bytes_per_s
            seconds += pool.latency_s
        seconds[tokens <= 0.0] = 0.0
        return seconds


def overlapped_s(transfer_s: FloatArray, compute_s: FloatArray, pool: PrefillPool) -> FloatArray:
    """What a transfer adds to a computation that it is pipelined with, layer group by layer group."""
    total: FloatArray = transfer_s + compute_s
    if pool.layered:
        total /= pool.layer_groups
        total += pool.overlap_share * np.maximum(transfer_s, compute_s)
    total -= compute_s
    total[transfer_s <= 0.0] = 0.0
    return total


def prefill_terms(request: Request, match: PrefixMatch, view: ClusterView, block_tokens: int, now: float) -> PrefillTerms:
    """Gather the terms. At least one token is always left to compute, since the first output token needs its logits.

    What is merely expected counts where it is going to be, for work there is done in turn, and cannot be fetched by others.
    """
    pool = view.prefill
    most_blocks = (request.prompt_tokens - 1) // block_tokens
    depths = match.depths.take(pool.slot)
    if len(request.block_hashes) > most_blocks:
        np.minimum(depths, most_blocks, out=depths)
    local: FloatArray = depths.astype(np.float64)
    if pool.distrusted:
        local *= pool.trust
        np.floor(local, out=local)
    local *= float(block_tokens)
    believed = match.confirmed
    if pool.distrusted:
        believed = np.minimum(match.confirmed, most_blocks)
        believed[pool.slot] = np.floor(believed[pool.slot] * pool.trust)
    best_blocks = min(believed.item(believed.argmax()), most_blocks)
    return PrefillTerms(
        view=view,
        now=now,
        prompt_tokens=request.prompt_tokens,
        queue_s=pool.queue_s(now),
        local_tokens=local,
        best_tokens=float(best_blocks * block_tokens),
        match=match,
        believed=believed,
        block_tokens=block_tokens,
    )


def _best_holder(believed: npt.NDArray[np.int32], blocks: int, view: ClusterView) -> tuple[Holder, float]:
    """Of those that have reported the most, the one whose outgoing link is the least shared; ties go to the lower slot."""
    slots = (believed >= blocks).nonzero()[0].tolist()
    holders = [view.holder_of_slot[slot] for slot in slots]
    speeds = [view.outbound_bytes_per_s(holder) for holder in holders]
    fastest = max(speeds)
    return holders[speeds.index(fastest)], fastest


@dataclass(slots=True)
class Candidates:
    """Every prefill worker as one decision saw it, in columns.

    `handover_s` is the hand-over by itself, which overlaps the prefill in `handover_groups` steps; None where the first token
    does not wait for it. `first_step_s` is the decode step that follows. `relay` reads the shared store for the chosen one.
    """

    ids: tuple[WorkerId, ...]
    queue_s: FloatArray
    local_tokens: FloatArray
    plans: Reuse
    score: FloatArray
    calibrated: BoolArray
    low_factor: FloatArray
    high_factor: FloatArray
    handover_s: FloatArray | None = None
    handover_groups: FloatArray | None = None
    first_step_s: float = 0.0
    relay: Relay | None = None
    trust: FloatArray | None = None  # how far each worker's claims were believed; None where all are

    def reuse(self, row: int) -> ReusePlan:
        plans, source = self.plans, None
        fetched = int(plans.fetched_tokens[row])
        if fetched:
            source = plans.sources[0 if plans.source_code is None else int(plans.source_code[row])]
        relay = self.relay.worker if self.relay is not None and self.relay.target == self.ids[row] else None
        return ReusePlan(int(self.local_tokens[row]), fetched, source, relay)

    def estimate(self, row: int, waited_s: float = 0.0) -> TTFTEstimate:
        """The row's estimate counted from the request's arrival, `waited_s` ago."""
        queue, prefill = float(self.queue_s[row]), float(self.plans.prefill_s[row])
        handover = self._after_prefill_s(row, prefill)
        transfer = float(self.plans.transfer_s[row]) + handover
        ahead = queue + transfer + prefill
        return TTFTEstimate(
            queue_s=waited_s + queue,
            transfer_s=transfer,
            prefill_s=prefill,
            low_s=waited_s + ahead * float(self.low_factor[row]),
            high_s=waited_s + ahead * float(self.high_factor[row]),
            calibrated=bool(self.calibrated[row]),
            handover_s=handover,
        )

    def _after_prefill_s(self, row: int, prefill_s: float) -> float:
        """From the end of the prefill to the first token."""
        if self.handover_s is None or self.handover_groups is None:
            return 0.0
        send_s, groups = float(self.handover_s[row]), float(self.handover_groups[row])
        if groups == 0.0:
            return 0.0
        total_s = (send_s + prefill_s) / groups + (1.0 - 1.0 / groups) * max(send_s, prefill_s)
        return total_s - prefill_s + self.first_step_s

    def rows(self, waited_s: float = 0.0) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(worker, self.reuse(row), self.estimate(row, waited_s), float(self.score[row]))
            for row, worker in enumerate(self.ids)
        )
