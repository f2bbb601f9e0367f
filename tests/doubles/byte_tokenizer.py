"""A tokenizer whose tokens are bytes: no files, and every multi-byte character spans several tokens."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

EOS = 256
BOS = 257


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < 256 else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """Ids 0-255 are bytes; 256 ends a text, 257 begins one."""

    vocab_size = 258
    eos_ids = (EOS,)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [*([BOS] if special else []), *text.encode("utf-8", errors="replace")]

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer()

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if any(message["content"] == "unrenderable" for message in messages):
            raise ValueError("the template does not take this message")
        return "".join(f"<{message['role']}>{message['content']}\n" for message in messages) + "<assistant>"
