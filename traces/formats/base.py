"""What a trace format is: the columns that it knows and a function from a row to a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from traces.formats.rows import Row
from traces.schema import TraceRequest

Parse: TypeAlias = Callable[[Row, int], TraceRequest]


class FileKind(StrEnum):
    JSONL = "jsonl"
    CSV = "csv"


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One public format. `block_tokens` is what one id of `hash_ids` stands for; unused where there are no ids.

    `from_first_row` tells that times are absolute, so that the first request becomes the origin.
    """

    name: str
    kind: FileKind
    required: tuple[str, ...]
    optional: tuple[str, ...]
    block_tokens: int
    parse: Parse
    from_first_row: bool = False

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(self.required + self.optional)
