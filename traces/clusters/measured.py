"""Puts what was measured on this machine into a cluster profile: the coefficients that `workers/profiler.py` remembers.

Each remembered profile is a JSON file with a key (device, chunk, block) and a fit; the one to take is the latest for the CPU
whose KV has the size that the cluster profile says. Steps then vary as much as the measurements did around their fit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from traces.clusters.profile import ClusterError, ClusterProfile

NORMAL_P10_TO_P90 = 2.563  # standard deviations
MOST_VARIATION = 0.5


def measured_profile(base: ClusterProfile, folder: Path) -> tuple[ClusterProfile, Path] | None:
    """`base` with the latest fitting measurement in `folder`, and that file; None when there is none. Raises ClusterError."""
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            fitted = stored["fitted"]["profile"]
            if stored["key"]["device"] == "cpu" and fitted["kv_bytes_per_token"] == base.kv_bytes_per_token:
                return _with(base, fitted), path
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ClusterError(
                f"measured profile {path} cannot be used ({error!r}); allowed: what the profiler writes"
            ) from error
    return None


def cluster_of(base: ClusterProfile, fitted: dict[str, Any], description: str) -> ClusterProfile:
    """A cluster whose workers are as fast as one that was measured, `fitted` being its cost profile's fields; what a worker's
    profile does not tell is that of `base`. Raises ValueError."""
    named = base.model_copy(update={"description": description, "kv_bytes_per_token": fitted["kv_bytes_per_token"]})
    return _with(named, fitted)


def _with(base: ClusterProfile, fitted: dict[str, Any]) -> ClusterProfile:
    residuals = fitted["residuals"]
    spread = (residuals["p90"] - residuals["p10"]) / NORMAL_P10_TO_P90
    values = base.model_dump() | {
        "block_tokens": fitted["block_tokens"],
        "step_tokens": fitted["chunk_tokens"] or base.step_tokens,
        "prefill": base.prefill.model_dump() | _coefficients(fitted, "prefill", "base_s", "per_token_s", "per_token2_s"),
        "decode": base.decode.model_dump() | _coefficients(fitted, "decode", "base_s", "per_sequence_s", "per_context_token_s"),
        "network": base.network.model_dump()
        | {"nic_bytes_per_s": fitted["transfer_bytes_per_s"], "latency_s": fitted["transfer_latency_s"]},
        "step_variation": min(max(spread, 0.0), MOST_VARIATION),
    }
    try:
        return ClusterProfile.model_validate(values)
    except ValidationError as error:
        raise ValueError(str(error)) from error


def _coefficients(fitted: dict[str, Any], kind: str, *names: str) -> dict[str, float]:
    return {name: fitted[f"{kind}_{name}"] for name in names}
