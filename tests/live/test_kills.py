"""Workers killed in mid-request, as often as `--kill-rounds` says: one uninterrupted, unchanged stream each time."""

from __future__ import annotations

import threading

import openai
import pytest

from tests.bench.served import Served
from tests.live.observe import STORY, busiest, eventually, stream, whole, workers

pytestmark = [pytest.mark.live, pytest.mark.slow]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kill_round" in metafunc.fixturenames:
        metafunc.parametrize("kill_round", range(metafunc.config.getoption("--kill-rounds")))


def test_a_killed_decode_worker_goes_unnoticed(served: Served, client: openai.OpenAI, kill_round: int) -> None:
    """SIGKILL after the tenth token: the text is the undisturbed one, and the service is whole again."""
    prompt = f"{STORY}On day {kill_round}"
    undisturbed = stream(client, prompt, 40)

    def kill_at_ten(count: int) -> None:
        if count == 10:
            workers(served, "DecodeWorker")[0].kill()

    assert "".join(stream(client, prompt, 40, kill_at_ten)) == "".join(undisturbed)
    eventually(lambda: whole(served))


def test_a_killed_prefill_worker_goes_unnoticed(served: Served, client: openai.OpenAI, kill_round: int) -> None:
    """SIGKILL in the middle of a long prompt: another worker computes it, and the service is whole again."""
    prompt = f"Time {kill_round}. " + STORY * 80
    killer = threading.Timer(1.0, lambda: busiest(workers(served, "PrefillWorker")).kill())
    killer.start()
    disturbed = stream(client, prompt, 12)
    killer.join()
    eventually(lambda: whole(served))
    assert "".join(disturbed) == "".join(stream(client, prompt, 12))
