"""Qwen-Bailian usage traces: JSONL with chats, turns and 16-token block hashes.

`parent_chat_id` of -1 marks the first turn. The last block may be absent or padded, so the number of ids may be rounded up
or down. The session of a turn is the first chat of its line of parents as far as the format tells: the parent, else itself.
"""

from __future__ import annotations

from traces.formats.base import FileKind, TraceFormat
from traces.formats.rows import MAX_ID, Row
from traces.schema import TraceRequest

BLOCK_TOKENS = 16
NO_PARENT = -1  # the file's own word for the first turn of a chat


def parse(row: Row, block_tokens: int) -> TraceRequest:
    input_tokens = row.tokens("input_length", minimum=1)
    chat = row.integer("chat_id", 0, MAX_ID)
    parent = row.integer("parent_chat_id", NO_PARENT, MAX_ID)
    counts = (-(-input_tokens // block_tokens), input_tokens // block_tokens)
    return TraceRequest(
        timestamp_s=row.seconds("timestamp", 1),
        input_tokens=input_tokens,
        output_tokens=row.tokens("output_length", minimum=0),
        hash_ids=row.ids("hash_ids", counts if counts[0] != counts[1] else counts[:1]),
        block_tokens=block_tokens,
        session=str(chat),
        parent=None if parent == NO_PARENT else str(parent),
        turn=row.integer("turn", 0, MAX_ID) if "turn" in row.values else None,
        traffic_class=str(row.values["type"]) if "type" in row.values else None,
    )


BAILIAN = TraceFormat(
    name="bailian",
    kind=FileKind.JSONL,
    required=("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids"),
    optional=("type", "turn"),
    block_tokens=BLOCK_TOKENS,
    parse=parse,
)
