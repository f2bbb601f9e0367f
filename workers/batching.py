"""What a worker computes next: which prompt by how many tokens, and which sequences decode together.

Pure: from plain descriptions of what waits and runs, and the number of blocks that can be had, to a plan; the shell carries it
out. The order of prompts is the order in which they came, because the scheduler has chosen it; a prompt whose pulled prefix is
still on its way lets others pass. Decode is continuous batching (Orca, OSDI'22): sequences join and leave between steps. When
blocks run out the youngest sequence gives its own back and is computed again later, so the oldest always goes on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

DEFAULT_CHUNK_TOKENS = 512
MIN_GROUP_BYTES = 4 << 20  # below this a transfer costs more for being one than for its bytes
MAX_GROUPS = 6
READY_GROUPS = 2  # of KV that is there already: while one is read, the next is written, and each more costs a call
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Running(Generic[K]):
    """A sequence that takes part in decode. `tokens_cached` of its tokens have KV, in `blocks` blocks; one more token comes."""

    key: K
    tokens_cached: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Waiting(Generic[K]):
    """A sequence that may join the batch. `blocks_needed` must be had first: none when its KV is here already."""

    key: K
    blocks_needed: int = 0


@dataclass(frozen=True, slots=True)
class DecodePlan(Generic[K]):
    """`step`: who decodes, oldest first; `grow`: those of them that need a further block; `preempt`: who gives its blocks
    back, youngest first; `admit`: who joins from the waiting line, in order."""

    step: tuple[K, ...] = ()
    grow: tuple[K, ...] = ()
    preempt: tuple[K, ...] = ()
    admit: tuple[K, ...] = ()


def chunk_length(computed_tokens: int, prompt_tokens: int, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> int:
    """How many tokens of a prompt the next step computes."""
    return min(chunk_tokens, prompt_tokens - computed_tokens)


def next_prompt(ready: Sequence[bool]) -> int | None:
    """Which of the prompts, in order of arrival, is computed next: the first that is ready."""
    return next((position for position, is_ready in enumerate(ready) if is_ready), None)


def plan_decode(
    running: Sequence[Running[K]], waiting: Sequence[Waiting[K]], *, available_blocks: int, block_tokens: int, max_batch: int
) -> DecodePlan[K]:
    """The next decode step. `running` is oldest first, `waiting` in the order in which it shall be served.

    Nobody joins in a step that preempts. The line keeps its order, except that a sequence which has its blocks passes one that
    does not fit: only by decoding does it ever give them back.
    """
    kept = list(running)
    preempted: list[K] = []
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


def _needs_block(sequence: Running[K], block_tokens: int) -> bool:
    return sequence.tokens_cached >= sequence.blocks * block_tokens


def _admit(waiting: Sequence[Waiting[K]], available: int, seats: int) -> tuple[K, ...]:
    admitted: list[K] = []
    for sequence in waiting:
        if len(admitted) >= seats:
            break
        if sequence.blocks_needed > available:
            available = 0  # whatever else needs blocks waits behind it
        else:
            available -= sequence.blocks_needed
            admitted.append(sequence.key)
    return tuple(admitted)


def layer_groups(num_layers: int, layer_bytes: int, most: int = MAX_GROUPS) -> list[range]:
    """How the layers of a chunk, whose new KV is `layer_bytes` a layer, are sent: even groups, each worth sending.

    The last group is what a decode worker waits for after the computing, so there are several where that pays.
    """
    count = max(1, min(most, num_layers, num_layers * layer_bytes // MIN_GROUP_BYTES))
    bounds = [num_layers * number // count for number in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]
