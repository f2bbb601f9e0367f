"""What an operator may ask of one worker's tiers: look, pin, unpin, drop, verify. Answers are JSON values.

A prefix is named by the hash of its last block; which blocks lead to it, each tier knows by itself. Every worker is asked, for
tiers are shared by some and indexes are not. Blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conductor.core.types import BlockHash
from workers.kv_store.base import KVTier
from workers.kv_store.retention import HeldBlock

MAX_LISTED = 1000


def list_prefixes(tier: KVTier, name: BlockHash | None) -> list[dict[str, Any]]:
    """The ends of what is held, latest use first; with a name, the chain that leads to it."""
    held = {block.name: block for block in tier.held()}
    inner = {block.parent for block in held.values()}
    if name is not None:
        ends = [held[block] for block in chain_to(name, held)]
    else:
        ends = sorted((block for block in held.values() if block.name not in inner), key=lambda block: -block.last_used_s)
    return [
        {
            "hash": f"{block.name:032x}",
            "blocks": len(chain_to(block.name, held)),
            "class": block.traffic_class,
            "last_used_s": block.last_used_s,
            "pinned": block.pinned,
        }
        for block in ends[:MAX_LISTED]
    ]


def pin(tier: KVTier, name: BlockHash | None) -> int:
    """How many blocks are pinned along with the named one."""
    return tier.pin(chain_to(_required(name), {block.name: block for block in tier.held()}))


def unpin(tier: KVTier, name: BlockHash | None) -> int:
    """Take back a pin, and those of ancestors that were pinned for its sake alone."""
    held = {block.name: block for block in tier.held()}
    pinned_below = Counter(block.parent for block in held.values() if block.pinned)
    going: list[BlockHash] = []
    for block in reversed(chain_to(_required(name), held)):
        if pinned_below[block] > (1 if going else 0) or not held[block].pinned:
            break
        going.append(block)
    tier.unpin(going)
    return len(going)


def drop(tier: KVTier, name: BlockHash | None) -> int:
    """Forget the named block and what follows it, or everything; pinned blocks stay."""
    return tier.remove([block.name for block in tier.held()] if name is None else [name])


def verify(tier: KVTier, name: BlockHash | None) -> dict[str, int]:
    """Read blocks, those that lead to the named one or all; what does not verify is quarantined."""
    held = {block.name: block for block in tier.held()}
    chosen = list(held) if name is None else chain_to(name, held)
    damaged = 0
    for block in chosen:
        with tier.read((block,)) as rows:
            damaged += not rows
    return {"checked": len(chosen), "damaged": damaged}


ACTIONS: Mapping[str, Callable[[KVTier, BlockHash | None], Any]] = {
    "ls": list_prefixes,
    "pin": pin,
    "unpin": unpin,
    "drop": drop,
    "verify": verify,
}


def carry_out(tiers: Sequence[KVTier], action: str, name: BlockHash | None) -> dict[str, Any]:
    """The answer of every tier, by its name. Raises `ValueError` for an unknown action."""
    if action not in ACTIONS:
        raise ValueError(f"action is {action!r}; allowed: {', '.join(ACTIONS)}")
    return {tier.tier.name.lower(): ACTIONS[action](tier, name) for tier in tiers}


def chain_to(name: BlockHash, held: Mapping[BlockHash, HeldBlock]) -> list[BlockHash]:
    """The blocks from a root to `name`; empty when it is not held."""
    chain: list[BlockHash] = []
    at: BlockHash | None = name
    while at is not None and at in held:
        chain.append(at)
        at = held[at].parent
    return chain[::-1]


def _required(name: BlockHash | None) -> BlockHash:
    if name is None:
        raise ValueError("the hash is missing; allowed: the hash of a prefix's last block, as `ls` prints it")
    return name
