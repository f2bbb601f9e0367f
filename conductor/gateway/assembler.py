"""From token outputs to text: incremental detokenisation, stop strings, log probabilities, the reason why a choice ended.

Pure and synchronous: one `TextAssembler` for each choice is fed `TokenOutput`s in order and answers with `Delta`s. A token's
log probability travels with the first piece of text that shows part of the token, so that nothing is told about text that a
stop string removes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from conductor.core.messages import TokenLogprob, TokenOutput
from conductor.core.types import FinishReason
from conductor.gateway.served_model import Detokenizer
from conductor.gateway.stops import StopBuffer


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One generated token with its probability; `start_chars` is where its text begins in the choice's output."""

    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...]
    start_chars: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token adds to a choice. `finish` is set on the last one."""

    text: str
    entries: tuple[TokenEntry, ...] = ()
    finish: FinishReason | None = None
    message: str | None = None


class TextAssembler:
    """Mutable; follows one choice. `output_tokens` counts every token that the model generated, shown or not."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], silent_ids: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopBuffer(stops)
        self._silent_ids = silent_ids
        self._entries: deque[TokenEntry] = deque()
        self._decoded_chars = 0
        self._shown_chars = 0
        self.output_tokens = 0

    def push(self, output: TokenOutput) -> Delta:
        """Take the next output. After a delta with `finish`, push no more."""
        text = self._decode(output)
        shown = self._stops.push(text)
        finish = FinishReason.STOP if self._stops.stopped else output.finish_reason
        if finish is not None and not self._stops.stopped:
            shown, finish = self._end(shown, finish)
        self._shown_chars += len(shown)
        return Delta(shown, self._release(finish) if self._entries else (), finish, output.message)

    def _decode(self, output: TokenOutput) -> str:
        if output.token_id is None:
            return ""
        self.output_tokens += 1
        if output.finish_reason is FinishReason.STOP and output.token_id in self._silent_ids:
            return ""
        if output.logprob is not None:
            self._entries.append(TokenEntry(output.token_id, output.logprob, output.top_logprobs, self._decoded_chars))
        text = self._detokenizer.add(output.token_id)
        self._decoded_chars += len(text)
        return text

    def _end(self, shown: str, finish: FinishReason) -> tuple[str, FinishReason]:
        """The engine has ended: show what was held back, unless that completes a stop string."""
        shown += self._stops.push(self._detokenizer.finish())
        if self._stops.stopped:
            return shown, FinishReason.STOP
        return shown + self._stops.flush(), finish

    def _release(self, finish: FinishReason | None) -> tuple[TokenEntry, ...]:
        """Entries whose text has begun to show; at an end without a stop string, all."""
        everything = finish is not None and not self._stops.stopped
        ready = []
        while self._entries and (everything or self._entries[0].start_chars < self._shown_chars):
            ready.append(self._entries.popleft())
        return tuple(ready)
