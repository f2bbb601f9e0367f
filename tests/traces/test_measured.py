"""A machine's own measurements in a cluster profile."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from conductor.core.cost_profile import CostProfile
from traces.clusters.measured import cluster_of, measured_profile
from traces.clusters.profile import ClusterError, load_profile

BASE = load_profile("smollm2-cpu")


def store(folder: Path, name: str, at_s: int, **changes: Any) -> Path:
    """A file as the profiler writes it, `at_s` its time of writing."""
    profile = {
        "prefill_base_s": 0.03,
        "prefill_per_token_s": 0.004,
        "prefill_per_token2_s": 1e-6,
        "decode_base_s": 0.05,
        "decode_per_sequence_s": 0.01,
        "decode_per_context_token_s": 1e-5,
        "kv_bytes_per_token": BASE.kv_bytes_per_token,
        "block_tokens": 64,
        "chunk_tokens": 256,
        "transfer_latency_s": 0.002,
        "transfer_bytes_per_s": 5e8,
        "residuals": {"p10": 0.9, "p50": 1.0, "p90": 1.1},
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"key": {"device": "cpu"}, "fitted": {"profile": profile | changes}}))
    os.utime(path, (at_s, at_s))
    return path


def test_latest_measurement_of_this_model_counts(tmp_path: Path) -> None:
    """An older one, and a later one of another model, do not."""
    store(tmp_path, "old", 1, decode_base_s=1.0)
    wanted = store(tmp_path, "own", 2)
    store(tmp_path, "other", 3, kv_bytes_per_token=1)
    found = measured_profile(BASE, tmp_path)
    assert found is not None
    profile, path = found
    assert path == wanted
    assert profile.step_tokens == 256
    truth = profile.service_time()
    assert truth.prefill.step_s([(0, 64)]) == pytest.approx(0.03 + 0.004 * 64 + 1e-6 * 64**2)
    assert truth.decode.step_s(2, 100) == pytest.approx(0.05 + 0.02 + 0.001)
    assert profile.step_variation == pytest.approx(0.2 / 2.563)


def test_a_measured_worker_of_another_model_makes_a_cluster_of_its_own(tmp_path: Path) -> None:
    """Its KV and speed are its own; what a profile does not tell is taken over."""
    stored = json.loads(store(tmp_path, "other", 1, kv_bytes_per_token=1000).read_text())
    cluster = cluster_of(BASE, stored["fitted"]["profile"], "another model")
    assert (cluster.description, cluster.kv_bytes_per_token, cluster.block_tokens) == ("another model", 1000, 64)
    assert cluster.network.nic_bytes_per_s == 5e8
    assert (cluster.device_blocks, cluster.max_batch) == (BASE.device_blocks, BASE.max_batch)


def test_stored_names_are_those_of_a_cost_profile(tmp_path: Path) -> None:
    """What the loader reads is what the profiler writes: the fields of a CostProfile."""
    stored = json.loads(store(tmp_path, "own", 1).read_text())["fitted"]["profile"]
    assert set(stored) <= set(CostProfile.__dataclass_fields__)


def test_without_a_measurement_there_is_none(tmp_path: Path) -> None:
    assert measured_profile(BASE, tmp_path / "nothing") is None


@pytest.mark.parametrize("text", ["{", "[]", '{"key": {}}', '{"key": {"device": "cpu"}, "fitted": {"profile": 3}}'])
def test_file_that_is_no_measurement_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(ClusterError, match=r"measured profile .*broken.json cannot be used"):
        measured_profile(BASE, tmp_path)


def test_impossible_coefficients_are_refused(tmp_path: Path) -> None:
    store(tmp_path, "own", 1, decode_base_s=-1.0)
    with pytest.raises(ClusterError, match="cannot be used"):
        measured_profile(BASE, tmp_path)
