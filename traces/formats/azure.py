"""Azure LLM inference traces of 2023 and 2024: CSV of TIMESTAMP, ContextTokens, GeneratedTokens.

Times are absolute, with or without an offset. There is no prefix identity: these traces test load, not caching.
"""

from __future__ import annotations

from datetime import UTC, datetime

from traces.formats.base import FileKind, TraceFormat
from traces.formats.rows import Row
from traces.schema import MOONCAKE_BLOCK_TOKENS, SkipReason, TraceRequest


def parse(row: Row, block_tokens: int) -> TraceRequest:
    return TraceRequest(
        timestamp_s=_moment_s(row),
        input_tokens=row.tokens("ContextTokens", minimum=1),
        output_tokens=row.tokens("GeneratedTokens", minimum=0),
        block_tokens=block_tokens,
    )


def _moment_s(row: Row) -> float:
    text = str(row.get("TIMESTAMP")).strip()
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        allowed = "a date and time such as 2023-11-16 18:17:03.9799600"
        raise row.error(SkipReason.BAD_VALUE, "TIMESTAMP", text, allowed) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


AZURE = TraceFormat(
    name="azure",
    kind=FileKind.CSV,
    required=("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    optional=(),
    block_tokens=MOONCAKE_BLOCK_TOKENS,
    parse=parse,
    from_first_row=True,
)
