"""`conductor serve --model ...` for every kind of state: answers, reuse, and transfers counted in the model's own bytes."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conductor.core.config import SchedulerConfig
from conductor.core.events import WorkerJoined
from conductor.flight_log import read
from models.convert_folder import Wanted, convert_folder
from models.folder import find_model, load_card
from models.kv_layout import number_format
from tests.bench.served import Served, serve
from tests.models.builders import write_tiny_folder

pytestmark = [pytest.mark.live, pytest.mark.slow]

BLOCK_TOKENS = 64
WINDOW = 32
TEXT = "A worker that holds the prefix of a prompt answers it first, and another one has to wait for it or compute it. "


def converted(folder: Path) -> Path:
    """Latent attention by conversion, from a small model of the Llama family."""
    write_tiny_folder(folder / "original", "llama", max_position_embeddings=512)
    convert_folder(str(folder / "original"), folder / "converted", TEXT * 5, Wanted(rope_dim=16, rank=20))
    return folder / "converted"


def windowed(folder: Path) -> Path:
    write_tiny_folder(folder, "mistral", sliding_window=WINDOW, max_position_embeddings=512)
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {"latent": converted, "sliding window": windowed}


@pytest.fixture(params=KINDS, scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[request.param](tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def log_folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def server(model: Path, log_folder: Path) -> Iterator[Served]:
    """One prefill and one decode worker; the first measures itself for a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONDUCTOR__WORKERS__PROFILE_BUDGET_S", "1")
        with serve("--model", str(model), "--prefill", "1", "--decode", "1", "--flight-log", str(log_folder)) as running:
            yield running


def decision(server: Served, decision_id: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v1/decisions/{decision_id}", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_the_model_answers_reuses_and_moves_its_true_bytes(server: Served, model: Path, log_folder: Path) -> None:
    """The profile that estimates rest on counts what the model's layout says, and so does what a hand-over really moved: of
    window layers the blocks of the last tokens alone."""
    card = load_card(str(model))
    prompt = TEXT * 2
    first = server.complete(prompt, max_tokens=6, model=card.name)
    again = server.complete(prompt, max_tokens=6, model=card.name)
    assert (first.hit_tokens, again.hit_tokens) == (0, (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
    moved = decision(server, first.headers["x-conductor-decision-id"])["actual"]["handover_bytes"]
    blocks = -(-len(prompt) // BLOCK_TOKENS)
    if WINDOW in {state.window_tokens for state in find_model(str(model)).config.kv_states(number_format("fp32"))}:
        blocks -= (len(prompt) - WINDOW + 1) // BLOCK_TOKENS
    assert moved == blocks * BLOCK_TOKENS * card.kv_bytes_per_token
    (log,) = log_folder.glob("*.flight.jsonl")
    joined = [record.event for record in read(log, SchedulerConfig)[1] if isinstance(record.event, WorkerJoined)]
    assert {event.worker.profile.kv_bytes_per_token for event in joined} == {card.kv_bytes_per_token}
