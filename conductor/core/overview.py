"""What an operator wants to see of a scheduler at a glance: the last decisions with every candidate, and what the last requests
add up to.

Everything is read from the decision log, the prefix index and the cluster view when somebody looks; nothing is counted on the
path of a request, and nothing is decided here. A prefix is hot when recent requests reused it: it is named by its last block,
and its replicas are the holders that have reported that block. Objectives are judged on what came of a request (true time to
first token, mean time between tokens), so requests in flight and cancelled ones are not judged.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conductor.core.cluster_view import ClusterView
from conductor.core.config import SchedulerConfig
from conductor.core.decision_log import DecisionLog, Record
from conductor.core.prefix_index import PrefixIndex
from conductor.core.types import SLO, BlockHash, Placement, Rejection, Tier

REQUESTS = 512  # how many of the last requests the figures are about
DECISIONS = 20  # how many of the last decisions are shown in full
CANDIDATES = 16  # of each decision, best first
PREFIXES = 12
PREFIX_NAME_DIGITS = 12


@dataclass(slots=True)
class _Heat:
    hits: int = 0
    tokens: int = 0
    last_s: float = 0.0


@dataclass(slots=True)
class _Worker:
    placed: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0


@dataclass(slots=True)
class _Sums:
    """What one walk over the records adds up."""

    objectives: Counter[str] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    workers: defaultdict[str, _Worker] = field(default_factory=lambda: defaultdict(_Worker))
    heat: defaultdict[BlockHash, _Heat] = field(default_factory=lambda: defaultdict(_Heat))
    estimates: list[dict[str, Any]] = field(default_factory=list)


class Overview:
    """Reads what the scheduler owns; changes nothing."""

    def __init__(self, config: SchedulerConfig, log: DecisionLog, index: PrefixIndex, view: ClusterView) -> None:
        self._config = config
        self._log = log
        self._index = index
        self._view = view

    def describe(self, now: float) -> dict[str, Any]:
        """The picture as JSON values, newest first where there is an order."""
        recent = self._log.recent(REQUESTS)
        sums = _Sums()
        for attempts in recent:
            self._add(sums, attempts)
        return {
            "policy": self._config.policy,
            "admission": self._config.admission,
            "block_tokens": self._config.block_tokens,
            "requests": len(recent),
            "window_s": now - recent[-1][0].arrived_s if recent else 0.0,
            "objectives": {name: sums.objectives[name] for name in ("met", "missed_ttft", "missed_tbt", "rejected")},
            "rejections": dict(sorted(sums.rejections.items())),
            "outcomes": dict(sorted(sums.outcomes.items())),
            "workers": self._workers(sums),
            "hot_prefixes": self._hot_prefixes(sums, now),
            "estimates": sums.estimates,
            "decisions": self._decisions([attempts[-1] for attempts in recent[:DECISIONS]], now),
        }

    def _add(self, sums: _Sums, attempts: Sequence[Record]) -> None:
        last = attempts[-1]
        decision, actual = last.decision, last.actual
        sums.outcomes[actual.outcome or "in_flight"] += 1
        if isinstance(decision, Rejection):
            sums.rejections[decision.reason.value] += 1
            sums.objectives["rejected"] += 1
            return
        self._add_reuse(sums, last, decision)
        verdict = judge(attempts, self._objectives(last))
        if verdict is not None:
            sums.objectives[verdict] += 1
        if actual.ttft_s is not None and last.request.emitted_tokens == 0:
            estimate = {"predicted_s": decision.ttft.total_s, "actual_s": actual.ttft_s, "worker": decision.prefill}
            sums.estimates.append(estimate | {"calibrated": decision.ttft.calibrated})

    def _add_reuse(self, sums: _Sums, record: Record, placed: Placement) -> None:
        request, actual = record.request, record.actual.reused_tokens
        reused = placed.reuse.reused_tokens if actual is None else actual
        worker = sums.workers[placed.prefill]
        worker.placed += 1
        worker.prompt_tokens += request.prompt_tokens
        worker.reused_tokens += reused
        depth = min(reused // self._config.block_tokens, len(request.block_hashes))
        if depth > 0:
            heat = sums.heat[request.block_hashes[depth - 1]]
            heat.hits += 1
            heat.tokens = depth * self._config.block_tokens
            heat.last_s = max(heat.last_s, record.decided_s)

    def _objectives(self, record: Record) -> SLO:
        own, default = record.request.slo, self._config.slo
        return SLO(
            default.ttft_s if own.ttft_s is None else own.ttft_s,
            default.tbt_s if own.tbt_s is None else own.tbt_s,
        )

    def _workers(self, sums: _Sums) -> dict[str, Any]:
        return {
            worker: {
                "placed": sums.workers[worker].placed,
                "prompt_tokens": sums.workers[worker].prompt_tokens,
                "reused_tokens": sums.workers[worker].reused_tokens,
                "tiers": self._tiers(worker),
            }
            for worker in sorted(self._view.specs)
        }

    def _tiers(self, worker: str) -> dict[str, Any]:
        """Blocks that the index knows in each tier that the worker, or its node, has; and how many fit."""
        capacity = self._view.specs[worker].capacity_blocks
        return {
            tier.name.lower(): {
                "blocks": self._index.num_claims(self._view.holder(worker, tier)),
                "capacity": capacity[tier],
            }
            for tier in Tier
            if tier in capacity
        }

    def _hot_prefixes(self, sums: _Sums, now: float) -> list[dict[str, Any]]:
        hottest = sorted(sums.heat.items(), key=lambda item: (-item[1].hits * item[1].tokens, item[0]))
        return [
            {
                "prefix": f"{block:x}"[:PREFIX_NAME_DIGITS],
                "tokens": heat.tokens,
                "hits": heat.hits,
                "last_hit_ago_s": now - heat.last_s,
                "replicas": [f"{holder.owner}/{holder.tier.name.lower()}" for holder in self._index.holders(block)],
            }
            for block, heat in hottest[:PREFIXES]
        ]

    def _decisions(self, records: Sequence[Record], now: float) -> list[dict[str, Any]]:
        described = []
        for record in records:
            values = self._log.explain(record.request.id) or {}
            best_first = sorted(values.pop("candidates", ()), key=_chosen_then_best)
            objectives = self._objectives(record)
            values |= {"ago_s": now - record.decided_s, "candidates": best_first[:CANDIDATES]}
            values |= {"candidates_left_out": max(0, len(best_first) - CANDIDATES)}
            values |= {"ttft_slo_s": objectives.ttft_s, "tbt_slo_s": objectives.tbt_s}
            described.append(values)
        return described


def _chosen_then_best(candidate: Mapping[str, Any]) -> tuple[bool, float, str]:
    score = candidate["score"]
    return not candidate["chosen"], math.inf if score is None else score, candidate["worker"]


def judge(attempts: Sequence[Record], objectives: SLO) -> str | None:
    """Whether a request that has finished met its objectives; None for one that has not, or has none."""
    actual, first_s = attempts[-1].actual, [one.actual.ttft_s for one in attempts if one.actual.ttft_s is not None]
    if not first_s or actual.finished_s is None or actual.output_tokens is None or objectives == SLO():
        return None
    if objectives.ttft_s is not None and first_s[0] > objectives.ttft_s:
        return "missed_ttft"
    tbt_s = (actual.finished_s - first_s[0]) / max(1, actual.output_tokens - 1)
    return "missed_tbt" if objectives.tbt_s is not None and tbt_s > objectives.tbt_s else "met"
