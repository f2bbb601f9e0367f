"""One request on one worker: its tokens, the blocks that hold its KV, and how far it has come.

    tokens   |<-- reused -->|<-- computed here -->|<- next ->|
             0              reused_tokens         computed   len(tokens)

KV of `tokens[:computed]` lies in the blocks of `table`; the first `committed` blocks of it are findable by hash. During decode
exactly one token, the last one drawn, is not computed yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from conductor.core.hashing import extend
from conductor.core.messages import GenerationJob, SamplingParams
from conductor.core.types import BlockHash, FinishReason, RequestId
from workers.block_pool import BlockId

SequenceKey: TypeAlias = tuple[RequestId, int]
"""Request id and attempt."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one attempt of one request. Only the compute thread changes it, but for `cancelled`."""

    job: GenerationJob
    tokens: list[int]
    hashes: list[BlockHash]
    table: list[BlockId] = field(default_factory=list)
    reused_tokens: int = 0
    computed: int = 0
    committed: int = 0
    compute_s: float = 0.0
    cancelled: bool = False

    @classmethod
    def of(cls, job: GenerationJob) -> Sequence:
        tokens = np.frombuffer(job.tokens, dtype="<i4").tolist()
        return cls(job, tokens, list(job.request.block_hashes))

    @property
    def key(self) -> SequenceKey:
        return self.job.request.id, self.job.request.attempt

    @property
    def sampling(self) -> SamplingParams:
        return self.job.sampling

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt of this attempt, output of earlier attempts included."""
        return self.job.request.prompt_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer so far, over all attempts."""
        return self.job.request.emitted_tokens + len(self.tokens) - self.prompt_tokens

    @property
    def original_prompt_tokens(self) -> int:
        return self.prompt_tokens - self.job.request.emitted_tokens

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ends with its last token, if it does."""
        if self.tokens[-1] in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if self.output_tokens >= self.sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def hash_of_block(self, index: int, block_tokens: int) -> BlockHash | None:
        """Hash of a full block, chained on through the output; None while no block of the prompt gives the chain a start."""
        while len(self.hashes) <= index:
            if not self.hashes:
                return None
            start = len(self.hashes) * block_tokens
            content = np.asarray(self.tokens[start : start + block_tokens], dtype="<i4").tobytes()
            self.hashes.append(extend(self.hashes[-1], content))
        return self.hashes[index]
