"""What a simulated worker announces of its own speed: a cost profile fitted on samples of the truth.

As on a real machine: the truth is measured on a grid of (prompt, reused) lengths, and least squares fit the scheduler's
cost form to the measurements. The fit is not exact, because the truth has another form; the spread of actual over fitted
times goes with it. Coefficients may not be negative: a term that would be is left out and the rest fitted again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from conductor.core.cost_profile import CostProfile, ResidualQuantiles
from traces.clusters.profile import ClusterProfile, FirstTokenFrom, Handover, LowerTier
from traces.service_time import DecodeTime, ServiceTime, chunks_of

PROMPT_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
REUSED_SHARES = (0.0, 0.25, 0.5, 0.75, 0.95)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT_TOKENS = (512, 2048, 8192, 16384)
Floats = NDArray[np.float64]


def fit_cost_profile(cluster: ClusterProfile) -> CostProfile:
    """The belief that a worker of `cluster` starts with."""
    truth = cluster.service_time()
    cells, measured = _measure_prefill(truth, cluster.step_tokens)
    rows = np.array([_prefill_row(prompt, reused, cluster.step_tokens) for prompt, reused in cells])
    base_s, per_token_s, per_token2_s = _least_squares(rows, measured)
    low, middle, high = np.percentile(measured / (rows @ np.array([base_s, per_token_s, per_token2_s])), (10, 50, 90))
    decode_base_s, decode_per_sequence_s, decode_per_context_token_s = _fit_decode(truth.decode, cluster)
    return CostProfile(
        prefill_base_s=base_s,
        prefill_per_token_s=per_token_s,
        prefill_per_token2_s=per_token2_s,
        decode_base_s=decode_base_s,
        decode_per_sequence_s=decode_per_sequence_s,
        decode_per_context_token_s=decode_per_context_token_s,
        kv_bytes_per_token=cluster.kv_bytes_per_token,
        block_tokens=cluster.block_tokens,
        transfer_latency_s=cluster.network.latency_s,
        transfer_bytes_per_s=cluster.network.nic_bytes_per_s,
        tier_bytes_per_s=_tier_speeds(cluster),
        chunk_tokens=cluster.step_tokens,
        packs_prompts=True,
        first_token_after_handover=cluster.first_token is FirstTokenFrom.DECODE,
        handover_overlaps_prefill=cluster.handover is Handover.STREAMED,
        layer_groups=cluster.layer_groups,
        residuals=ResidualQuantiles(float(low), float(middle), float(high)),
        samples=len(measured),
    )


def _measure_prefill(truth: ServiceTime, step_tokens: int) -> tuple[list[tuple[int, int]], Floats]:
    cells = [(prompt, int(prompt * share)) for prompt in PROMPT_TOKENS for share in REUSED_SHARES]
    times = [truth.prompt_s(prompt, reused, step_tokens) for prompt, reused in cells]
    return cells, np.array(times)


def _prefill_row(prompt: int, reused: int, step_tokens: int) -> tuple[float, float, float]:
    return (len(chunks_of(prompt, reused, step_tokens)), prompt - reused, prompt**2 - reused**2)


def _fit_decode(truth: DecodeTime, cluster: ClusterProfile) -> tuple[float, float, float]:
    cells = [
        (batch, batch * context)
        for batch in BATCHES
        for context in CONTEXT_TOKENS
        if batch <= cluster.max_batch and batch * context <= cluster.capacity_tokens
    ]
    rows = np.array([(1, batch, tokens) for batch, tokens in cells], dtype=float)
    measured = np.array([truth.step_s(batch, tokens) for batch, tokens in cells])
    base_s, per_sequence_s, per_context_token_s = _least_squares(rows, measured)
    return base_s, per_sequence_s, per_context_token_s


def _least_squares(rows: Floats, measured: Floats) -> tuple[float, ...]:
    """Coefficients that make the squared relative error least, none of them negative."""
    weighted = rows / measured[:, None]
    kept = list(range(rows.shape[1]))
    while True:
        scale = np.abs(weighted[:, kept]).max(axis=0)
        fitted = np.linalg.lstsq(weighted[:, kept] / scale, np.ones(len(measured)), rcond=None)[0] / scale
        negative = [column for column, value in zip(kept, fitted, strict=True) if value < 0]
        if not negative:
            break
        kept.remove(negative[0])
    coefficients = dict(zip(kept, fitted, strict=True))
    return tuple(float(coefficients.get(column, 0.0)) for column in range(rows.shape[1]))


def _tier_speeds(cluster: ClusterProfile) -> tuple[float, ...]:
    """Bytes per second by tier, device first."""
    if not cluster.tiers:
        return ()
    names: tuple[LowerTier, ...] = ("host", "disk", "shared")
    speeds = {name: cluster.tiers[name].bytes_per_s for name in names if name in cluster.tiers}
    if "shared" in speeds and cluster.storage is not None:
        speeds["shared"] = min(speeds["shared"], cluster.storage.nic_bytes_per_s)
    return (cluster.network.nic_bytes_per_s, *(speeds.get(name, 0.0) for name in names))
