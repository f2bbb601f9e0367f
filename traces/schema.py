"""What a trace is, whatever file it came from: requests in order of arrival, and what reading them met.

A trace knows lengths, arrival times and, in some formats, the identity of prefixes; it never holds text. Identity comes as
`hash_ids`, one id a block of `block_tokens` tokens, the last block partial. Ids are cumulative: equal ids mean an equal
prefix up to and including that block (FAST'25 trace description). Formats without identity have no ids.

Every fault of a file is a `TraceError`. A lenient reader counts each one in a `ReadReport` and goes on; a strict one stops.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

MOONCAKE_BLOCK_TOKENS = 512


class SkipReason(StrEnum):
    """Why a row was not read."""

    NOT_UTF8 = "not_utf8"
    NOT_JSON = "not_json"
    LINE_TOO_LONG = "line_too_long"
    DAMAGED_STREAM = "damaged_stream"
    COLUMN_COUNT = "column_count"
    MISSING_FIELD = "missing_field"
    BAD_VALUE = "bad_value"
    NEGATIVE_TIME = "negative_time"
    UNORDERED_TIME = "unordered_time"
    HASH_COUNT = "hash_count"
    UNKNOWN_COLUMN = "unknown_column"
    NO_REQUEST = "no_request"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a trace file. `line` counts from 1; None when the file as a whole is at fault."""

    reason: SkipReason
    file: str
    line: int | None
    field: str
    value: str
    allowed: str

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}, line {self.line}"
        return f"{where}: {self.field} is {self.value}; allowed: {self.allowed}"


class TraceError(ValueError):
    """A trace file breaks its format. `fault` says where, what was found and what is allowed."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    `timestamp_s` counts from the trace's own origin and never falls from one request to the next. `hash_ids` holds one id a
    block, `ceil(input_tokens / block_tokens)` of them, or none when the format has no prefix identity. `output_tokens` is 0
    when the original request failed; a replay asks for at least one token.
    """

    timestamp_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    session: str | None = None
    parent: str | None = None
    turn: int | None = None
    traffic_class: str | None = None

    @property
    def full_block_ids(self) -> tuple[int, ...]:
        """Ids of the blocks that the prompt fills: those that a cache of whole blocks can hold."""
        return self.hash_ids[: self.input_tokens // self.block_tokens]

    @property
    def tail_tokens(self) -> int:
        """Tokens of the last block when it is partial, else 0."""
        return self.input_tokens % self.block_tokens

    def tokens_of(self, blocks: int) -> int:
        """Prompt tokens in the first `blocks` blocks, the partial one counted as far as it goes."""
        return min(blocks * self.block_tokens, self.input_tokens)


@dataclass(slots=True)
class ReadReport:
    """What one reading met: rows kept, rows skipped by reason, columns that were ignored, and the first few faults."""

    requests: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    ignored_columns: Counter[str] = field(default_factory=Counter)
    examples: list[Fault] = field(default_factory=list)

    @property
    def skipped_rows(self) -> int:
        return sum(self.skipped.values())

    def skip(self, fault: Fault) -> None:
        """Count a row that was not read, and keep its fault as an example while there are few."""
        self.skipped[fault.reason.value] += 1
        if len(self.examples) < 5:
            self.examples.append(fault)

    def as_json(self) -> dict[str, object]:
        return {
            "requests": self.requests,
            "skipped": dict(sorted(self.skipped.items())),
            "ignored_columns": dict(sorted(self.ignored_columns.items())),
            "examples": [str(fault) for fault in self.examples],
        }
