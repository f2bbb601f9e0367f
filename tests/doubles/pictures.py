"""What the dashboard shows, made by a real scheduler that served a small cluster in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from conductor.core.config import SchedulerConfig
from conductor.core.types import SLO, Request
from conductor.engine_client import ClusterStatus
from tests.core.builders import BLOCK_TOKENS, PROFILE, blocks
from tests.core.served import World

MODEL = "test-model"
TRUTH = replace(  # belief is never quite right
    PROFILE, prefill_base_s=0.02, prefill_per_token_s=0.8e-4, prefill_per_token2_s=9e-9, decode_per_context_token_s=1e-6
)
QUEUES_S = {"p0": 0.9, "p1": 0.35, "p2": 0.0}


@dataclass(frozen=True)
class Picture:
    status: ClusterStatus
    overview: dict[str, Any]


def arrivals(count: int, rng: Random) -> list[tuple[float, Request]]:
    """Three system prompts, each under its own conversations, and every sixth request new from the start."""
    planned, at_s = [], 0.0
    for number in range(count):
        at_s += rng.expovariate(9.0)
        shared = 0 if number % 6 == 0 else (12, 30, 60)[number % 3]
        length = shared + rng.randint(4, 60)
        hashes = blocks(length, name=100 + number, shared=0)
        prefix = blocks(shared, name=number % 3 + 1)
        request = Request(
            f"chatcmpl-{number:04d}",
            length * BLOCK_TOKENS + 17,
            (*prefix, *hashes[shared:]),
            max_output_tokens=rng.randint(20, 120),
            slo=SLO(ttft_s=0.8, tbt_s=0.0175),
        )
        planned.append((at_s, request))
    return planned


def picture(requests: int = 160, prefill: int = 3, decode: int = 2) -> Picture:
    """As it stands when the last of the requests has ended."""
    world = World(SchedulerConfig(admission="early"), PROFILE, TRUTH, (prefill, decode))
    planned = arrivals(requests, Random(7))
    world.run(planned)
    seen = world.scheduler.overview(planned[-1][0] + 3.0 if planned else 0.0)
    belief = world.scheduler.worker_belief()
    workers = {
        worker: {"role": "prefill" if worker.startswith("p") else "decode", "node": f"node-{number % 2}", "decode_batch": 2}
        for number, worker in enumerate(sorted(belief))
    }
    busy = {name: {"prefill_queue_s": queue_s, "prefill_jobs": round(queue_s * 5)} for name, queue_s in QUEUES_S.items()}
    described = {name: workers[name] | belief[name] | busy.get(name, {}) for name in workers}
    return Picture(ClusterStatus(True, "serving", MODEL, described, {"in_flight": 3.0}), seen)
