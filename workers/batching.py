"""What the compute thread does next: one prefill chunk, or one decode step over a batch. Pure planning over plain counts.

Prefill goes by order of arrival, one chunk at a time, so that a cancellation or an urgent call waits for a chunk at most.
Decode is continuous: every step runs all sequences that have a block for their next token. When blocks run out, the youngest
sequences give theirs up and are computed again later (their prefix often still is in the cache). Where one worker does both,
chunks and steps take turns, so that a long prompt does not stall the tokens of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute `tokens` further tokens of the sequence at the head of the prefill queue."""

    tokens: int


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Run the first `count` of the running sequences; those behind are preempted first."""

    count: int


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing can be done before something arrives or a block becomes free."""


Step: TypeAlias = PrefillChunk | DecodeStep | Idle


@dataclass(frozen=True, slots=True)
class BatchLimits:
    chunk_tokens: int
    max_batch: int


def plan_step(
    limits: BatchLimits, *, uncomputed_tokens: int | None, new_blocks: Sequence[int], available_blocks: int, decoded_last: bool
) -> Step:
    """The next step.

    `uncomputed_tokens`: what the head of the prefill queue still has to compute, None without one. `new_blocks`: for every
    running sequence, oldest first, how many blocks (0 or 1) its next token needs. `decoded_last`: whether the last step was
    a decode step.
    """
    chunk = None if uncomputed_tokens is None else PrefillChunk(min(limits.chunk_tokens, uncomputed_tokens))
    if chunk is not None and (decoded_last or not new_blocks):
        return chunk
    count = runnable(limits.max_batch, new_blocks, available_blocks)
    if count:
        return DecodeStep(count)
    return chunk or Idle()


def runnable(max_batch: int, new_blocks: Sequence[int], available_blocks: int) -> int:
    """How many of the oldest sequences can take a step with the blocks that are available."""
    count, needed = 0, 0
    for blocks in new_blocks[:max_batch]:
        if needed + blocks > available_blocks:
            break
        needed += blocks
        count += 1
    return count
