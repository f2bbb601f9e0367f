"""One request's output as its front end sees it: every index once, in order, across workers and attempts.

The first token leaves the prefill worker and the rest the decode worker, on separate connections, so an output may overtake
its predecessor: it is held until its turn. What belongs to a former attempt is dropped, because the continuation already
contains everything that was passed on. Nothing here waits or calls.
"""

from __future__ import annotations

import struct
from dataclasses import replace

from conductor.core.events import RequestFinished
from conductor.core.messages import GenerationJob, TokenOutput
from conductor.core.types import FinishReason, Placement, WorkerId
from conductor.engine_client import HashPrompt

TOKEN_BYTES = 4


class OutputStream:
    """State of one request in flight at its front end."""

    def __init__(self, job: GenerationJob) -> None:
        self.job = job
        self.reason: FinishReason | None = None
        self._original = job
        self._emitted: list[int] = []
        self._early: dict[int, TokenOutput] = {}
        self._placement: Placement | None = None
        self._sender: WorkerId | None = None

    @property
    def finished(self) -> bool:
        return self.reason is not None

    @property
    def attempt(self) -> int:
        return self.job.request.attempt

    @property
    def next_index(self) -> int:
        return len(self._emitted)

    def placed(self, placement: Placement) -> None:
        """Note who works on the current attempt."""
        if placement.attempt == self.attempt:
            self._placement = placement

    def depends_on(self, worker: WorkerId) -> bool:
        """Whether output of the current attempt may be lost with this worker: the prefill worker until its token has come, and
        whoever sends the rest."""
        if self.finished or self._placement is None:
            return False
        if self.next_index == self.job.request.emitted_tokens and worker == self._placement.prefill:
            return True
        return worker in (self._sender, self._placement.decode)

    def push(self, output: TokenOutput) -> list[TokenOutput]:
        """What can be passed on now that `output` has come."""
        if self.finished or output.attempt != self.attempt or output.index < self.next_index:
            return []
        if output.index > self.job.request.emitted_tokens:
            self._sender = output.worker
        self._early[output.index] = output
        ready: list[TokenOutput] = []
        while not self.finished and (following := self._early.pop(self.next_index, None)) is not None:
            ready.append(following)
            self.reason = following.finish_reason
            if following.token_id is None:
                break  # an end without a token takes no index
            self._emitted.append(following.token_id)
        return ready

    def end(self, reason: FinishReason, message: str | None = None) -> TokenOutput:
        """The output that ends the stream here and now, without a token."""
        self.reason = reason
        return TokenOutput(self.job.request.id, self.attempt, self.next_index, None, "", reason, message=message)

    def ending(self) -> RequestFinished | None:
        """Word that the reader has it all, which a lost worker may have taken with it; None if the reader has not."""
        if self.reason is None or not self.reason.is_natural:
            return None
        return RequestFinished(self.job.request.id, self.attempt, self.next_index, self.reason)

    def exhausted(self) -> bool:
        """Whether every token that was asked for has been passed on."""
        return self.next_index >= self._original.sampling.max_tokens

    def continue_as_next_attempt(self, hash_prompt: HashPrompt) -> GenerationJob:
        """The job that goes on after what has been passed on; outputs of the former attempt count no longer."""
        original = self._original.request
        tokens = self._original.tokens + struct.pack(f"<{self.next_index}i", *self._emitted)
        request = replace(
            original,
            prompt_tokens=len(tokens) // TOKEN_BYTES,
            block_hashes=hash_prompt(tokens, original.cache_domain),
            max_output_tokens=original.max_output_tokens - self.next_index,
            attempt=self.attempt + 1,
            emitted_tokens=self.next_index,
        )
        self.job = replace(self._original, request=request, tokens=tokens)
        self._early.clear()
        self._placement = self._sender = None
        return self.job
