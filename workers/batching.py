"""What a worker computes next: which prompt by how many tokens, and which sequences decode together.

Pure: from plain descriptions of what waits and runs, and the number of blocks that can be had, to a plan; the shell carries it
out. The order of prompts is the order in which they came, because the scheduler has chosen it; a prompt whose pulled prefix is
still on its way lets others pass. Decode is continuous batching (Orca, OSDI'22): sequences join and leave between steps. When
blocks run out the youngest sequence gives its own back and is computed again later, so the oldest always goes on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

DEFAULT_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Running:
    """A sequence that takes part in decode. `tokens_cached` of its tokens have KV, in `blocks` blocks; one more token comes."""

    key: Hashable
    tokens_cached: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sequence that may join the batch. `blocks_needed` must be had first: none when its KV is here already."""

    key: Hashable
    blocks_needed: int = 0


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """`step`: who decodes, oldest first; `grow`: those of them that need a further block; `preempt`: who gives its blocks
    back, youngest first; `admit`: who joins from the waiting line, in order."""

    step: tuple[Hashable, ...] = ()
    grow: tuple[Hashable, ...] = ()
    preempt: tuple[Hashable, ...] = ()
    admit: tuple[Hashable, ...] = ()


def chunk_length(computed_tokens: int, prompt_tokens: int, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> int:
    """How many tokens of a prompt the next step computes."""
    return min(chunk_tokens, prompt_tokens - computed_tokens)


def next_prompt(ready: Sequence[bool]) -> int | None:
    """Which of the prompts, in order of arrival, is computed next: the first that is ready."""
    return next((position for position, is_ready in enumerate(ready) if is_ready), None)


def plan_decode(
    running: Sequence[Running], waiting: Sequence[Waiting], *, available_blocks: int, block_tokens: int, max_batch: int
) -> DecodePlan:
    """The next decode step. `running` is oldest first, `waiting` in the order in which it shall be served.

    Nobody joins in a step that preempts, nor past one that does not fit: the line keeps its order.
    """
    kept = list(running)
    preempted: list[Hashable] = []
    available = available_blocks
    while kept and (needed := sum(_needs_block(sequence, block_tokens) for sequence in kept)) > available:
        youngest = kept.pop()
        preempted.append(youngest.key)
        available += youngest.blocks
    if not kept:
        needed = 0
    return DecodePlan(
        step=tuple(sequence.key for sequence in kept),
        grow=tuple(sequence.key for sequence in kept if _needs_block(sequence, block_tokens)),
        preempt=tuple(preempted),
        admit=() if preempted else _admit(waiting, available - needed, max_batch - len(kept)),
    )


def _needs_block(sequence: Running, block_tokens: int) -> bool:
    return sequence.tokens_cached >= sequence.blocks * block_tokens


def _admit(waiting: Sequence[Waiting], available: int, seats: int) -> tuple[Hashable, ...]:
    admitted: list[Hashable] = []
    for sequence in waiting[: max(0, seats)]:
        if sequence.blocks_needed > available:
            break
        available -= sequence.blocks_needed
        admitted.append(sequence.key)
    return tuple(admitted)
