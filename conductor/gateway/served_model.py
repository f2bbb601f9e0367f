"""What the gateway needs to know of the model that the cluster serves: names, limits, a tokenizer, and how a prompt becomes
block hashes. `models.tokenizer` and `conductor.core.hashing` provide the parts; `ServedModel` binds them so that the rest of
the gateway depends on neither files nor libraries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from conductor.engine_client import HashPrompt


class Detokenizer(Protocol):
    """Turns token ids into text one by one; holds back bytes that do not form a whole character yet."""

    def add(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""

    def finish(self) -> str:
        """What is still held back, with replacement characters for broken bytes."""


class Tokenizer(Protocol):
    """The part of `models.tokenizer.TextTokenizer` that the gateway uses."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str: ...

    def token_text(self, token_id: int) -> str:
        """One token as text; a part of a character shows as U+FFFD."""

    def detokenizer(self) -> Detokenizer: ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation, special tokens included, up to where the assistant's answer starts; raises
        ValueError when the template refuses it."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model under one or more names; the first name is the one that answers carry."""

    names: tuple[str, ...]
    max_context: int
    tokenizer: Tokenizer
    hash_prompt: HashPrompt
    created_s: int = 0
    owned_by: str = "kv-conductor"

    @property
    def name(self) -> str:
        return self.names[0]
