"""Mooncake JSONL: the format of the traces published with FAST'25.

Each line is an object with `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`, one id for every
512 tokens, the last partial block included. Ids are cumulative over the prefix.
"""

from __future__ import annotations

from traces.formats.base import FileKind, TraceFormat
from traces.formats.rows import Row
from traces.schema import MOONCAKE_BLOCK_TOKENS, TraceRequest

MS_PER_S = 1000


def parse(row: Row, block_tokens: int) -> TraceRequest:
    input_tokens = row.tokens("input_length", minimum=1)
    return TraceRequest(
        timestamp_s=row.seconds("timestamp", MS_PER_S),
        input_tokens=input_tokens,
        output_tokens=row.tokens("output_length", minimum=0),
        hash_ids=row.ids("hash_ids", (-(-input_tokens // block_tokens),)),
        block_tokens=block_tokens,
    )


MOONCAKE = TraceFormat(
    name="mooncake",
    kind=FileKind.JSONL,
    required=("timestamp", "input_length", "output_length", "hash_ids"),
    optional=(),
    block_tokens=MOONCAKE_BLOCK_TOKENS,
    parse=parse,
)
