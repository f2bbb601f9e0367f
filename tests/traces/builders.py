"""Small traces and outcomes for tests."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from traces.outcomes import OutcomeStatus, RequestOutcome
from traces.schema import TraceRequest

BLOCK_TOKENS = 512
PUBLISHED_NAME = Path("shared", "traces", "conversation_trace.jsonl")
PUBLISHED = next((up / PUBLISHED_NAME for up in Path(__file__).parents if (up / PUBLISHED_NAME).exists()), None)
needs_published = pytest.mark.skipif(
    PUBLISHED is None, reason="the published conversation trace lies in no folder above this one"
)


def mooncake_line(timestamp: float = 0, blocks: int = 2, output: int = 3, first_id: int = 0) -> str:
    fields = {"timestamp": timestamp, "input_length": blocks * BLOCK_TOKENS, "output_length": output}
    return json.dumps(fields | {"hash_ids": list(range(first_id, first_id + blocks))})


def request_of(ids: Iterable[int], at_s: float = 0.0, tail_tokens: int = 0) -> TraceRequest:
    """A request whose last block has `tail_tokens` tokens, or is full."""
    ids = tuple(ids)
    missing = BLOCK_TOKENS - tail_tokens if tail_tokens else 0
    return TraceRequest(at_s, len(ids) * BLOCK_TOKENS - missing, 5, ids)


def write_lines(path: Path, *lines: str | bytes, compression: str = "plain") -> Path:
    raw = b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines)
    packed = {"plain": lambda: raw, "gzip": lambda: gzip.compress(raw), "zstd": lambda: zstandard.compress(raw)}
    path.write_bytes(packed[compression]())
    return path


def outcome(index: int = 0, status: OutcomeStatus = OutcomeStatus.COMPLETED, **known: Any) -> RequestOutcome:
    given: dict[str, Any] = {"due_s": float(index), "input_tokens": 100, "sent_s": float(index)} | known
    return RequestOutcome(index=index, status=status, **given)
