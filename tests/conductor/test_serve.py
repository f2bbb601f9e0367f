"""What is checked before anything starts, and what is said when all of it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conductor import serve
from conductor.config import Config, load
from conductor.gateway import GatewaySettings, ServedModel
from models.errors import ModelError
from models.folder import ModelCard
from tests.models.builders import write_tiny_folder

MEMINFO = "MemTotal:       24000000 kB\nMemFree:          100000 kB\nMemAvailable:    8000000 kB\n"
CARD = ModelCard("tiny", "r", max_context=512, vocab_size=100, kv_bytes_per_token=1000, namespace=("tiny",))
SERVED = ServedModel(("tiny",), 512, tokenizer=None, hash_prompt=lambda tokens, tenant: ())  # type: ignore[arg-type]
PREPARED = serve.Prepared(CARD, SERVED, SERVED.hash_prompt, weights_bytes=10**9)


def config(**flags: Any) -> Config:
    return load(None, {}, {key.replace("__", "."): value for key, value in flags.items()}).config


def test_available_memory_is_the_machine_s_or_the_control_group_s(tmp_path: Path) -> None:
    """The smaller of the two counts."""
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text(MEMINFO)
    assert serve.available_bytes(meminfo, limit) == 8_000_000 * 1024
    limit.write_text("max\n")
    assert serve.available_bytes(meminfo, limit) == 8_000_000 * 1024
    limit.write_text("1000000\n")
    assert serve.available_bytes(meminfo, limit) == 1_000_000
    assert serve.available_bytes(tmp_path / "none", limit) is None


def test_the_estimate_grows_with_blocks_and_workers() -> None:
    """One more prefill worker costs its process and its blocks; weights are mapped once."""
    base = serve.memory_needed_bytes(config(workers__prefill=1, workers__prefill_blocks=100), PREPARED)
    more_blocks = serve.memory_needed_bytes(config(workers__prefill=1, workers__prefill_blocks=200), PREPARED)
    more_workers = serve.memory_needed_bytes(config(workers__prefill=2, workers__prefill_blocks=100), PREPARED)
    assert more_blocks - base == 100 * 64 * 1000
    assert more_workers - base == 100 * 64 * 1000 + serve.BASE_PROCESS_BYTES


def test_too_little_memory_is_said_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names what is needed, what there is, and what to lower."""
    monkeypatch.setattr(serve, "available_bytes", lambda: 2**30)
    with pytest.raises(serve.ServeError, match=r"not enough memory: .* about [0-9.]+ GiB and 1\.0 GiB are available; lower"):
        serve.check_memory(config(), PREPARED)


def test_memory_of_another_machine_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining a cluster says nothing about this machine's memory."""
    monkeypatch.setattr(serve, "available_bytes", lambda: 0)
    serve.check_memory(config(cluster__address="ray.example:6379"), PREPARED)


@pytest.mark.parametrize(("host", "open_to_others"), [("127.0.0.1", False), ("::1", False), ("0.0.0.0", True), ("::", True)])
def test_a_gateway_that_anybody_may_use_says_so(host: str, open_to_others: bool) -> None:
    """Beyond this machine and without keys; the address and a request to try stand there in either case."""
    lines = serve.ready_lines(host, 8000, "m", GatewaySettings()).splitlines()
    keyed = serve.ready_lines(host, 8000, "m", GatewaySettings(keys_file=Path("keys.yaml"))).splitlines()
    url = f"http://[{host}]:8000" if ":" in host else f"http://{host}:8000"
    assert (lines[0], lines[-1].split()[:2]) == (f"ready: {url}", ["curl", f"{url}/v1/chat/completions"])
    assert ["may use it" in line for line in lines[1:-1]] == [True] * open_to_others
    assert len(keyed) == 2


def test_tenants_share_no_prefix() -> None:
    """Equal prompts of two tenants have no block hash in common; one tenant's always agree."""
    hash_prompt = serve.prompt_hasher(("tiny", "r"), block_tokens=4)
    tokens = bytes(4 * 9)
    assert len(hash_prompt(tokens, "a")) == 2
    assert hash_prompt(tokens, "a") == hash_prompt(tokens, "a")
    assert set(hash_prompt(tokens, "a")) & set(hash_prompt(tokens, "b")) == set()


def test_stages_beyond_the_model_s_layers_are_refused_by_the_name_of_their_setting(
    tmp_path: Path,
) -> None:
    """What people can change is what the message names."""
    write_tiny_folder(tmp_path, "llama")
    with pytest.raises(ModelError, match=r"workers\.prefill_stages is 99; allowed: 1 to 3, the number of the model's layers"):
        serve.prepare_model(config(model__name=str(tmp_path), workers__prefill_stages=99))
