"""BurstGPT: CSV of Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type, in later files also
Session ID and Elapsed time. Failed requests have 0 response tokens. There is no prefix identity.
"""

from __future__ import annotations

from traces.formats.base import FileKind, TraceFormat
from traces.formats.rows import Row
from traces.schema import MOONCAKE_BLOCK_TOKENS, TraceRequest


def parse(row: Row, block_tokens: int) -> TraceRequest:
    session = str(row.values.get("Session ID", "")).strip()
    log_type = str(row.values.get("Log Type", "")).strip()
    return TraceRequest(
        timestamp_s=row.seconds("Timestamp", 1),
        input_tokens=row.tokens("Request tokens", minimum=1),
        output_tokens=row.tokens("Response tokens", minimum=0),
        block_tokens=block_tokens,
        session=session or None,
        traffic_class=log_type or None,
    )


BURSTGPT = TraceFormat(
    name="burstgpt",
    kind=FileKind.CSV,
    required=("Timestamp", "Request tokens", "Response tokens"),
    optional=("Session ID", "Elapsed time", "Model", "Total tokens", "Log Type"),
    block_tokens=MOONCAKE_BLOCK_TOKENS,
    parse=parse,
)
