"""What the scheduler believes of a worker's speed: fitted coefficients and the spread of their residuals.

Prefill of a prompt of `n` tokens whose first `p` are reused takes

    T = c0 + c1*(n - p) + c2*(n^2 - p^2)    seconds,

the form that equation 1 of the Mooncake paper (FAST'25, section 5.2) and its measurements support. A profile is fitted
outside of the core (`workers/profiler.py` on a machine, the simulator on its own ground truth) and reaches the scheduler
inside a `WorkerJoined` event, so a flight log is complete by itself. A profile with too few samples says that it is not
calibrated, and then the scheduler places without rejecting.

A worker that is a pipeline of stages takes the next step of a prompt before it has finished one: after the share s of its
time (`flow_share`). Then a prompt takes s*T and, for its last step to flow through, the rest of that step's own time.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_CALIBRATED_SAMPLES = 12


@dataclass(frozen=True, slots=True)
class ResidualQuantiles:
    """Actual over predicted prefill time at the 10th, 50th and 90th percentile."""

    p10: float = 1.0
    p50: float = 1.0
    p90: float = 1.0


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Fitted cost model of one kind of worker.

    `prefill_*` are c0 (s), c1 (s/token), c2 (s/token^2). A decode step takes
    `decode_base_s + decode_per_sequence_s * batch + decode_per_context_token_s * context_tokens`.
    `chunk_tokens` is the longest run of new tokens that the worker computes in one step; longer prompts pay c0 again for
    every further step. `packs_prompts` tells that one step may compute several prompts. `first_token_after_handover` tells
    that the first token leaves the decode worker, after transfer and one decode step, rather than the prefill worker.

    Of `kv_bytes_per_token` the share `kv_window_bytes_per_token` is of sliding-window layers, and moves between workers for a
    prefix's last `kv_window_tokens` tokens only; tiers keep all.
    """

    prefill_base_s: float
    prefill_per_token_s: float
    prefill_per_token2_s: float
    decode_base_s: float
    decode_per_sequence_s: float
    decode_per_context_token_s: float
    kv_bytes_per_token: int
    block_tokens: int
    transfer_latency_s: float = 0.0
    transfer_bytes_per_s: float = float("inf")
    tier_bytes_per_s: tuple[float, ...] = ()
    chunk_tokens: int | None = None
    packs_prompts: bool = False
    first_token_after_handover: bool = False
    handover_overlaps_prefill: bool = True
    layer_groups: int = 1
    flow_share: float = 1.0
    residuals: ResidualQuantiles = ResidualQuantiles()
    samples: int = 0
    kv_window_bytes_per_token: int = 0
    kv_window_tokens: int = 0

    @property
    def calibrated(self) -> bool:
        return self.samples >= MIN_CALIBRATED_SAMPLES

    def prefill_s(self, prompt_tokens: int, reused_tokens: int) -> float:
        """Seconds to compute tokens `reused_tokens..prompt_tokens`."""
        n, p = prompt_tokens, reused_tokens
        steps = 1 if self.chunk_tokens is None else max(1, -(-(n - p) // self.chunk_tokens))
        serial_s = self._serial_s(steps, n, p)
        if self.flow_share == 1.0 or steps == 1 or self.chunk_tokens is None:
            return serial_s
        last_step_s = self._serial_s(1, n, p + (steps - 1) * self.chunk_tokens)
        return self.flow_share * serial_s + (1.0 - self.flow_share) * last_step_s

    def _serial_s(self, steps: int, n: int, p: int) -> float:
        return self.prefill_base_s * steps + self.prefill_per_token_s * (n - p) + self.prefill_per_token2_s * (n * n - p * p)

    def moved_bytes(self, tokens: int) -> int:
        """What moves of so many tokens of a prefix, up to its end, from worker to worker."""
        left_behind = max(0, tokens - self.kv_window_tokens) * self.kv_window_bytes_per_token
        return tokens * self.kv_bytes_per_token - left_behind

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Seconds of one decode step over `batch` sequences that hold `context_tokens` of KV together."""
        return self.decode_base_s + self.decode_per_sequence_s * batch + self.decode_per_context_token_s * context_tokens
