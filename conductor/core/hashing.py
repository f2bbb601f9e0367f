"""From tokens to block hashes: each hash chains its parent's, so it names a whole prefix inside one KV namespace.

The chain is seeded by everything that the bytes of a KV cache depend on: model, weights, tokenizer, KV dtype and layout,
adapter, tenant salt, block size. Two namespaces never share a block. A hit serves KV that somebody else computed, so the
hash is cryptographic (BLAKE2b, 128 bits): nobody can build a prompt that collides with another tenant's. It depends on nothing
but its input, so every process of a cluster agrees on it. Partial blocks have no hash and are never reused.
(Mooncake FAST'25, section 4.1, PrefixHash.)
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

from conductor.core.types import BlockHash

Buffer: TypeAlias = bytes | bytearray | memoryview

TOKEN_BYTES = 4  # tokens travel as little-endian int32
HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class KVNamespace:
    """What KV bytes depend on besides the tokens.

    `model` lists what identifies weights, tokenizer, KV dtype and layout (`models.folder.ModelCard.namespace`). `adapter` None
    is the base model, which differs from an adapter named "". `salt` isolates a tenant; tenants with one salt share prefixes.
    """

    model: tuple[str, ...]
    block_tokens: int
    adapter: str | None = None
    salt: str = ""

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens is {self.block_tokens!r}; it must be an integer of at least 1")

    @property
    def seed(self) -> BlockHash:
        """The parent of every first block. Fields are length-prefixed, so no two field lists run together alike."""
        digest = blake2b(digest_size=HASH_BYTES, person=b"kv-namespace")
        adapter = () if self.adapter is None else (self.adapter,)
        for group in (self.model, (str(self.block_tokens),), adapter, (self.salt,)):
            digest.update(len(group).to_bytes(4, "little"))
            for text in group:
                encoded = text.encode("utf-8", "surrogatepass")
                digest.update(len(encoded).to_bytes(4, "little") + encoded)
        return int.from_bytes(digest.digest(), "little")


def extend(parent: BlockHash, tokens: Buffer) -> BlockHash:
    """The hash of the block `tokens` (little-endian int32) that follows `parent`."""
    digest = blake2b(parent.to_bytes(HASH_BYTES, "little"), digest_size=HASH_BYTES)
    digest.update(tokens)
    return int.from_bytes(digest.digest(), "little")


def hash_blocks(parent: BlockHash, tokens: Buffer, block_tokens: int) -> tuple[BlockHash, ...]:
    """Hashes of the full blocks of `tokens` that follow `parent` (a namespace's seed at the start of a prompt)."""
    view = memoryview(tokens)
    if view.itemsize not in (1, TOKEN_BYTES):
        raise ValueError(f"tokens has items of {view.itemsize} bytes; it must be bytes or little-endian int32")
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens!r}; it must be an integer of at least 1")
    view = view.cast("B")
    step = block_tokens * TOKEN_BYTES
    hashes = []
    for start in range(0, len(view) - step + 1, step):
        parent = extend(parent, view[start : start + step])
        hashes.append(parent)
    return tuple(hashes)
