"""One request's tokens on one engine: what it starts from, how far its KV reaches, and which blocks hold it."""

from __future__ import annotations

from dataclasses import dataclass, field

from conductor.core.messages import SamplingParams
from conductor.core.types import BlockHash
from workers.block_pool import BlockId


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a sequence starts from. `hashes`: one a full block; `root`: what the first block's hash chains to.

    The last `emitted_tokens` of `tokens` are output of an earlier attempt.
    """

    tokens: tuple[int, ...]
    hashes: tuple[BlockHash, ...]
    root: BlockHash
    sampling: SamplingParams
    emitted_tokens: int = 0


@dataclass(slots=True)
class KVSequence:
    """Whose token is where:

        tokens  [0 ... computed) [computed ... len(tokens))
                 KV in `table`    to be computed; during decode exactly one, the token drawn last
        blocks  [0 ... named)    [named ... len(table))
                 carry a hash     partial, or being filled

    `reused_tokens` of the prompt were found in the cache. The last blocks of these, as many as there are `spare` ones, lack
    window state and are to be computed again in the spare ones. `received` are (block, layer) whose KV came from elsewhere;
    `in_part`: not all of them, since windows have left some behind, so that no block may be named and reused.
    """

    prompt: Prompt
    tokens: list[int]
    hashes: list[BlockHash]
    table: list[BlockId]
    computed: int
    named: int
    reused_tokens: int
    spare: list[BlockId] = field(default_factory=list)
    received: set[tuple[int, int]] = field(default_factory=set)
    in_part: bool = False

    @property
    def output_tokens(self) -> int:
        """Length of the whole output so far, earlier attempts included."""
        return len(self.tokens) - len(self.prompt.tokens) + self.prompt.emitted_tokens
