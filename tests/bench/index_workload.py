"""The blocks and prompts that index benchmarks run on, the same for us and for a peer. Standard library only, so that a
peer's interpreter can import it."""

from __future__ import annotations

import random
from collections.abc import Iterator

CHAIN_BLOCKS = 188  # a prompt of 12k tokens in blocks of 64
LONG_BLOCKS = 2000  # 128k tokens
SHARED_BLOCKS = 8  # every chain starts with one of a few system prompts
WORKERS = 64


def chain(number: int, blocks: int = CHAIN_BLOCKS) -> tuple[int, ...]:
    """Block hashes of prompt `number`, 64-bit: the first few are shared with every sixteenth other prompt."""
    shared, own = random.Random(f"shared {number % 16}"), random.Random(f"own {number} {blocks}")
    head = [shared.getrandbits(64) for _ in range(SHARED_BLOCKS)]
    return (*head, *(own.getrandbits(64) for _ in range(blocks - SHARED_BLOCKS)))


def holders(number: int) -> list[tuple[int, int]]:
    """(worker, blocks held) of prompt `number`: most have one holder, some have replicas of different depth."""
    draw = random.Random(f"holders {number}")
    workers = draw.sample(range(WORKERS), draw.choice((1, 1, 1, 2, 4)))
    return [
        (worker, CHAIN_BLOCKS if rank == 0 else draw.randrange(SHARED_BLOCKS, CHAIN_BLOCKS))
        for rank, worker in enumerate(workers)
    ]


def placements(blocks: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(worker, chain held by it) until about `blocks` different blocks have been named."""
    for number in range(blocks // CHAIN_BLOCKS):
        whole = chain(number)
        for worker, held in holders(number):
            yield worker, whole[:held]


def queries(blocks: int, count: int) -> list[list[int]]:
    """Prompts to look up: a cached prefix of random length and then blocks nobody has."""
    draw = random.Random("queries")
    numbers = [draw.randrange(blocks // CHAIN_BLOCKS) for _ in range(count)]
    cut = [draw.randrange(SHARED_BLOCKS, CHAIN_BLOCKS + 1) for _ in range(count)]
    return [
        [*chain(number)[:keep], *(draw.getrandbits(64) for _ in range(CHAIN_BLOCKS - keep))]
        for number, keep in zip(numbers, cut, strict=True)
    ]
