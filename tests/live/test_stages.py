"""A prefill worker in two stages beside an ordinary one, on the real model: the same texts, and a stage that dies unnoticed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import openai
import psutil
import pytest

from tests.bench.served import Served, serve
from tests.live.observe import MODEL, STORY, eventually, whole, workers

pytestmark = [pytest.mark.live, pytest.mark.slow]

# Short chunks: many in the flow, and a profile that is measured quickly. In turn: whose prompt it is is known beforehand.
CONFIG = """
workers: {prefill: 2, prefill_stages: [2, 1], chunk_tokens: 128, profile_budget_s: 2}
scheduler: {policy: round_robin}
flight_log: {enabled: false}
"""
LONG = STORY * 45  # of seven chunks


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("staged") / "conductor.yaml"
    file.write_text(CONFIG)
    with serve("--config", str(file)) as running:
        yield running
        tree = running.tree()
    _, alive = psutil.wait_procs(tree, timeout=60)
    assert [process.name() for process in alive] == []


def complete(served: Served, prompt: str) -> tuple[str, str, int]:
    """Which prefill worker was chosen, the greedy text as it was streamed, and how much of the prompt was reused."""
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0, timeout=120) as client:
        raw = client.completions.with_raw_response.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = list(raw.parse())
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    usage = next(chunk.usage for chunk in chunks if chunk.usage is not None)
    return raw.headers["x-conductor-prefill-worker"], text, int(usage.model_dump()["prompt_cache_hit_tokens"])


def test_a_group_answers_as_one_worker_does_and_a_stage_dies_unnoticed(staged: Served) -> None:
    """Computed and reused by group and by single worker: one text. Then SIGKILL to a stage in the middle of a long prompt: the
    stream goes on elsewhere with the same text, and the group is started again, whole."""
    answers = [complete(staged, STORY * 20) for _ in range(4)]
    assert [worker for worker, _, _ in answers] == ["prefill-0", "prefill-1"] * 2
    assert len({text for _, text, _ in answers}) == 1
    assert [hit > 0 for _, _, hit in answers] == [False, False, True, True]

    (stage,) = workers(staged, "PrefillStage")
    busy_s = stage.cpu_times().user
    killer = threading.Thread(target=lambda: kill_once_busier(stage, busy_s + 0.2))
    killer.start()
    worker, disturbed, _ = complete(staged, LONG)
    assert (worker, killer.is_alive(), stage.is_running()) == ("prefill-0", False, False)
    eventually(lambda: whole(staged) and len(workers(staged, "PrefillStage")) == 1)

    def by_the_group() -> bool:
        worker, text, _ = complete(staged, LONG)
        assert text == disturbed
        return worker == "prefill-0"

    eventually(by_the_group)


def kill_once_busier(stage: psutil.Process, than_s: float) -> None:
    eventually(lambda: stage.cpu_times().user > than_s)
    stage.kill()
