"""Two tenants on one real service: what one has cached helps the other in nothing, neither in tokens nor in time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import httpx
import pytest
from scipy.stats import mannwhitneyu

from conductor.gateway.keys import new_key
from tests.bench.served import Served, serve
from tests.gateway.test_access import A_KEY, B_KEY, entry, write_keys
from tests.live.observe import MODEL, STORY

pytestmark = [pytest.mark.live, pytest.mark.slow]

PROMPTS = 6
WORDS = 8  # times the story, so that computing it takes many times what its reuse does


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("keys")
    file = write_keys(folder / "keys.yaml", a=entry(A_KEY), b=entry(B_KEY))
    config = folder / "conductor.yaml"
    config.write_text(f"gateway: {{keys_file: {file}}}\nworkers: {{prefill: 1, decode: 1}}\nflight_log: {{enabled: false}}\n")
    with serve("--config", str(config)) as running:
        yield running


def prompt(name: str) -> str:
    """Differs from every other from its first block on."""
    return f"{name}. {STORY * WORDS}"


def ask(served: Served, key: str, text: str) -> tuple[float, int]:
    """Seconds to the whole answer of one token, and how much of the prompt came from a cache."""
    body = {"model": MODEL, "prompt": text, "max_tokens": 1, "temperature": 0}
    started = time.perf_counter()
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"http://127.0.0.1:{served.port}/v1/completions", json=body, headers=headers, timeout=120)
    took_s = time.perf_counter() - started
    assert answer.status_code == 200, answer.text
    return took_s, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_another_tenant_s_prefix_gives_neither_a_hit_nor_a_hint(keyed: Served) -> None:
    """Prompts that another tenant has cached take this one as long as prompts that nobody has; its own take far less."""
    ask(keyed, B_KEY, prompt("warm-up"))
    for number in range(PROMPTS):
        ask(keyed, A_KEY, prompt(f"theirs {number}"))
    theirs, nobody_s = [], []
    for number in range(PROMPTS):
        theirs.append(ask(keyed, B_KEY, prompt(f"theirs {number}")))
        nobody_s.append(ask(keyed, B_KEY, prompt(f"nobody {number}")))
    own = [ask(keyed, B_KEY, prompt(f"theirs {number}")) for number in range(PROMPTS - 3, PROMPTS)]

    assert [hit for _, hit in (*theirs, *nobody_s)] == [0] * 2 * PROMPTS
    assert all(hit > 0 for _, hit in own)
    times, fresh = [took_s for took_s, _ in theirs], [took_s for took_s, _ in nobody_s]
    assert mannwhitneyu(times, fresh, alternative="less").pvalue > 0.001
    assert statistics.median(took_s for took_s, _ in own) < 0.5 * statistics.median(times)


def test_strangers_get_nothing(keyed: Served) -> None:
    """No key, an unknown key, and another tenant's decision."""
    url = f"http://127.0.0.1:{keyed.port}"
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
    unknown = {"authorization": f"Bearer {new_key()}"}
    assert httpx.post(f"{url}/v1/completions", json=body, headers=unknown).status_code == 401
    own = {"authorization": f"Bearer {A_KEY}"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=own, timeout=60)
    decision = f"{url}/v1/decisions/{answer.headers['x-conductor-decision-id']}"
    assert httpx.get(decision, headers=own).status_code == 200
    assert httpx.get(decision, headers={"authorization": f"Bearer {B_KEY}"}).status_code == 404
    assert httpx.get(f"{url}/dashboard/events").status_code == 401
