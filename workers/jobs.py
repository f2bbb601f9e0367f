"""From a generation job to a prompt, and from drawn tokens to outputs: the rules that prefill and decode workers share.

Pure. Decides whether a job can be taken at all, and whether a token is the last one. `max_tokens` counts the whole output,
tokens that an earlier attempt has emitted included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from conductor.core.messages import GenerationJob, TokenLogprob, TokenOutput
from conductor.core.types import BlockHash, FinishReason, RequestId, WorkerId
from models.sampling import SampledToken
from workers.engine import Engine
from workers.kv_transfer.base import KVTicket
from workers.sequence import KVSequence, Prompt

TOKEN_BYTES = 4
JobKey: TypeAlias = tuple[RequestId, int]
PartKey: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class HandoverPart:
    """KV of the prompt's blocks `first_block...`, as many as the ticket has, in the ticket's layers."""

    first_block: int
    ticket: KVTicket

    @property
    def key(self) -> PartKey:
        """Parts with the same key are the same KV, offered again."""
        return self.first_block, self.ticket.first_layer

    @property
    def blocks(self) -> range:
        return range(self.first_block, self.first_block + self.ticket.blocks)

    @property
    def layers(self) -> range:
        return range(self.ticket.first_layer, self.ticket.stop_layer)


def job_key(job: GenerationJob) -> JobKey:
    return job.request.id, job.request.attempt


def prompt_of(job: GenerationJob, root: BlockHash) -> Prompt:
    tokens = np.frombuffer(job.tokens, dtype="<i4").tolist()
    return Prompt(tuple(tokens), job.request.block_hashes, root, job.sampling, job.request.emitted_tokens)


def refusal(job: GenerationJob, engine: Engine) -> str | None:
    """Why this engine can never run the job, None when it can."""
    request = job.request
    if len(job.tokens) != request.prompt_tokens * TOKEN_BYTES or request.prompt_tokens < 1:
        return f"prompt_tokens is {request.prompt_tokens} but the job carries {len(job.tokens)} bytes of tokens"
    full_blocks = request.prompt_tokens // engine.cache.block_tokens
    if len(request.block_hashes) != full_blocks:
        return f"block_hashes has {len(request.block_hashes)} entries; the prompt has {full_blocks} full blocks"
    if request.prompt_tokens + 1 > engine.max_sequence_tokens:
        longest = engine.max_sequence_tokens - 1
        return f"the prompt has {request.prompt_tokens} tokens; this worker can hold at most {longest}"
    vocab = engine.model.vocab_size
    tokens = np.frombuffer(job.tokens, dtype="<i4")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        return f"token ids must lie in 0..{vocab - 1}; the prompt has {int(tokens.min())}..{int(tokens.max())}"
    return None


def finish_reason(sequence: KVSequence, token_id: int, engine: Engine) -> FinishReason | None:
    """Why `token_id`, just appended, is the last token; None when the sequence goes on."""
    sampling = sequence.prompt.sampling
    if token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if sequence.output_tokens >= sampling.max_tokens or len(sequence.tokens) >= engine.max_sequence_tokens:
        return FinishReason.LENGTH
    return None


def token_output(
    job: GenerationJob,
    worker: WorkerId,
    sequence: KVSequence,
    token: SampledToken,
    reason: FinishReason | None,
    reused_tokens: int | None = None,
) -> TokenOutput:
    """The output that carries the token just appended to `sequence`."""
    return TokenOutput(
        request_id=job.request.id,
        attempt=job.request.attempt,
        index=sequence.output_tokens - 1,
        token_id=token.token_id,
        worker=worker,
        finish_reason=reason,
        logprob=token.logprob,
        top_logprobs=tuple(TokenLogprob(token_id, logprob) for token_id, logprob in token.top),
        reused_tokens=reused_tokens,
    )


def last_output(
    job: GenerationJob, worker: WorkerId, index: int, reason: FinishReason, message: str | None = None
) -> TokenOutput:
    """An end without a token: cancelled or failed."""
    return TokenOutput(job.request.id, job.request.attempt, index, None, worker, reason, message=message)
