"""`kvcache_centric` against Algorithm 1 of the Mooncake paper (FAST'25, section 6), written out as the paper prints it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest

from conductor.core.cluster_view import ClusterView
from conductor.core.config import SchedulerConfig
from conductor.core.cost_profile import CostProfile
from conductor.core.placement import Situation
from conductor.core.policies import policy_named
from conductor.core.prefill_pool import PrefillJob
from conductor.core.prefix_index import PrefixIndex
from conductor.core.tbt import DecodeNeed
from conductor.core.ttft import prefill_terms
from conductor.core.types import Holder, Request, Role, Tier
from tests.core.builders import BLOCK_TOKENS, PROFILE, worker

STATES = 10_000
STATES_PER_CLUSTER = 100
ROOT = 5_000


@dataclass(frozen=True, slots=True)
class Instance:
    """A prefill instance as the algorithm sees it."""

    name: str
    profile: CostProfile
    nic_bytes_per_s: float
    prefix_len: int
    queue_s: float


def algorithm_1(
    pool: list[Instance], prompt_tokens: int, threshold: float, best_nic_bytes_per_s: float
) -> tuple[str | None, float, int, float]:
    """(p, TTFT, transfer_len, T_transfer) of the loop over the prefill pool, line by line.

    The ratio `best_len / prefix_len` of a cold instance counts as infinite while anybody holds anything, and as 0 otherwise.
    """
    ttft, p, chosen_transfer_len, chosen_transfer = math.inf, None, 0, 0.0
    best_len = 0
    for instance in pool:
        if instance.prefix_len > best_len:
            best_len = instance.prefix_len
    for instance in pool:
        if instance.prefix_len > 0:
            ratio = best_len / instance.prefix_len
        elif best_len > 0:
            ratio = math.inf
        else:
            ratio = 0.0
        if ratio > threshold:
            prefix_len = best_len
            transfer_len = best_len - instance.prefix_len
            bandwidth = min(instance.nic_bytes_per_s, best_nic_bytes_per_s, instance.profile.transfer_bytes_per_s)
            t_transfer = instance.profile.transfer_latency_s + transfer_len * instance.profile.kv_bytes_per_token / bandwidth
        else:
            prefix_len = instance.prefix_len
            transfer_len = 0
            t_transfer = 0.0
        t_queue = instance.queue_s
        t_prefill = instance.profile.prefill_s(prompt_tokens, prefix_len)
        if ttft > t_transfer + t_queue + t_prefill:
            ttft = t_transfer + t_queue + t_prefill
            p, chosen_transfer_len, chosen_transfer = instance.name, transfer_len, t_transfer
    return p, ttft, chosen_transfer_len, chosen_transfer


class RandomCluster:
    """Prefill workers of random speed; prefixes and queues are drawn anew for every state."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.index = PrefixIndex()
        self.view = ClusterView(self.index)
        nic = rng.choice((2e9, 1e10, 5e10))
        self.names = [f"p{number:02d}" for number in range(rng.randint(1, 8))]
        for name in self.names:
            profile = replace(
                PROFILE,
                prefill_base_s=rng.choice((0.0, 0.01)),
                prefill_per_token_s=rng.choice((1e-5, 1e-4, 3e-4)),
                prefill_per_token2_s=rng.choice((0.0, 1e-9)),
                transfer_latency_s=rng.choice((0.0, 0.002)),
                transfer_bytes_per_s=rng.choice((1e9, 1e10)),
                chunk_tokens=rng.choice((None, 512)),
            )
            self.view.join(worker(name, Role.PREFILL, profile=profile, nic_bytes_per_s=nic), 1)
        self.view.join(worker("d0", Role.DECODE), 1)
        self.nic = nic

    def draw(self, number: int, threshold: float) -> tuple[Situation, list[Instance]]:
        """A request whose prefixes lie on the workers by chance, and what the algorithm sees of it."""
        rng, pool = self.rng, self.view.prefill
        prompt_tokens = rng.randint(1, 40 * BLOCK_TOKENS)
        full = prompt_tokens // BLOCK_TOKENS
        hashes = tuple(ROOT + number * 100 + depth for depth in range(full))
        instances = []
        for name in self.names:
            held = rng.choice((0, 0, full, rng.randint(0, full), (full + 1) // 2))
            self.index.store(Holder(name, Tier.DEVICE), None, hashes[:held])
            queue_s = rng.choice((0.0, 0.0, rng.uniform(0.0, 0.5)))
            for old in list(pool._work[name]):
                pool.release(name, old, float(number))
            if queue_s:
                pool.book(name, f"job-{number}", PrefillJob(queue_s, 64), float(number))
            reusable = min(held, (prompt_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
            believed_s = pool.worker_queue_s(name, float(number))
            instances.append(Instance(name, pool.specs[name].profile, self.nic, reusable, believed_s))
        request = Request(f"r{number}", prompt_tokens, hashes, max_output_tokens=1)
        return self._situation(request, threshold, float(number)), instances

    def _situation(self, request: Request, threshold: float, now: float) -> Situation:
        config = SchedulerConfig(
            block_tokens=BLOCK_TOKENS, policy="kvcache_centric", kvcache_balancing_threshold=threshold, late_binding=False
        )
        terms = prefill_terms(request, self.index.match(request.block_hashes), self.view, BLOCK_TOKENS, now)
        return Situation(
            request=request,
            terms=terms,
            need=DecodeNeed(1, request.prompt_tokens),
            view=self.view,
            config=config,
            now=now,
            sequence=0,
            waited_s=0.0,
            waiting=0,
            prefill_eligible=self.view.prefill.accepts,
            decode_eligible=self.view.decode.accepts,
        )


def test_kvcache_centric_equals_algorithm_1_on_ten_thousand_random_states() -> None:
    """The same worker, time to first token and transferred length, whatever lies where and whoever is busy."""
    rng = random.Random(20_25)
    policy = policy_named("kvcache_centric")
    fetched = tied = 0
    for number in range(STATES):
        if number % STATES_PER_CLUSTER == 0:
            cluster = RandomCluster(rng)
        threshold = rng.choice((1.0, 1.5, 2.0, 4.0))
        situation, instances = cluster.draw(number, threshold)
        expected = algorithm_1(instances, situation.request.prompt_tokens, threshold, cluster.nic)
        choice = policy(situation)
        assert choice is not None
        estimate = choice.candidates.estimate(choice.row)
        reuse = choice.candidates.reuse(choice.row)
        assert expected[0] == choice.prefill or expected[1] == pytest.approx(choice.candidates.score[choice.row], abs=1e-12)
        assert expected[1:2] == pytest.approx((estimate.total_s,), rel=1e-9)
        tied += expected[0] != choice.prefill
        if expected[0] == choice.prefill:
            assert expected[2] == reuse.fetched_tokens
            assert expected[3] == pytest.approx(estimate.transfer_s, rel=1e-9, abs=1e-12)
        fetched += reuse.fetched_tokens > 0
    assert tied <= STATES // 1000, "only rounding of equal times may name another worker"
    assert fetched > STATES // 20, "the states hardly ever call for a transfer"
