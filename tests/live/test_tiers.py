"""A prefix outlives the workers that computed it: the Conductor has it restored from the host's memory."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.bench.served import Served
from tests.live.observe import MODEL, STORY, eventually, host_memory, metric, whole, workers

pytestmark = [pytest.mark.live, pytest.mark.slow]
PROMPT = "In the tiers below: " + STORY * 25 + "The last entry of the year was short:"
FULL_BLOCKS = 7  # of 64 tokens in the prompt


def ask(client: openai.OpenAI) -> tuple[str, int, str]:
    """Text, cached tokens and id of a greedy completion."""
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    parsed = raw.parse()
    cached = parsed.usage.prompt_tokens_details.cached_tokens
    return parsed.choices[0].text, cached, raw.headers["x-conductor-decision-id"]


def decision(served: Served, decision_id: str) -> object:
    return httpx.get(f"http://127.0.0.1:{served.port}/v1/decisions/{decision_id}", timeout=10).json()


def test_a_prefix_outlives_everybody_who_computed_it(served: Served, client: openai.OpenAI) -> None:
    """First all prefill workers are killed, then the decode worker: every device pool is cold, the answer is the same."""
    eventually(lambda: whole(served))
    before = metric(served, "conductor_worker_host_stored")
    text, _, _ = ask(client)
    eventually(lambda: metric(served, "conductor_worker_host_stored") >= before + FULL_BLOCKS)
    for actor_class in ("PrefillWorker", "DecodeWorker"):
        for process in workers(served, actor_class):
            process.kill()
        eventually(lambda: not whole(served))
        eventually(lambda: whole(served))
    again, cached, decision_id = ask(client)
    assert again == text
    assert cached == 64 * FULL_BLOCKS
    assert "/host" in str(decision(served, decision_id))


def test_all_workers_of_the_host_share_one_memory(served: Served) -> None:
    """And no tier fails; that the memory is gone when the deployment stops is checked where it is stopped."""
    assert len(host_memory(served)) == 1
    assert metric(served, "conductor_worker_host_failed") == 0
