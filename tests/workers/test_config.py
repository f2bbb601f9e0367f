"""A worker's configuration names what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from conductor.core.types import Role
from workers.config import WorkerConfig


def config(**changes: Any) -> WorkerConfig:
    return WorkerConfig(**({"worker_id": "p0", "role": Role.PREFILL, "model": "m", "num_blocks": 4} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"worker_id": ""}, "worker_id is ''"),
        ({"block_tokens": 0}, "block_tokens is 0; it must be an integer of at least 1"),
        ({"chunk_tokens": 1.5}, "chunk_tokens is 1.5"),
        ({"num_blocks": None}, "exactly one of them"),
        ({"kv_memory_bytes": 1}, "exactly one of them"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"stages": 0}, "stages is 0; it must be an integer of at least 1"),
        ({"stages": 2, "role": Role.DECODE}, "stages is 2 for a decode worker; it must be 1"),
        ({"lease_s": 0}, "lease_s is 0; it must be above 0"),
        ({"kv_dtype": "int4"}, "kv_dtype is 'int4'; allowed: float32, bfloat16, float16"),
        ({"transport": "loopback,loopback"}, "each once"),
        ({"transport": "pigeon"}, "transport is 'pigeon'; allowed: auto, or one or several"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], message: str) -> None:
    """Field, value and what is allowed."""
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        config(**changes)


def test_blocks_follow_from_a_memory_budget() -> None:
    """As many whole blocks as fit; less than one is refused."""
    assert config().blocks(1000) == 4
    assert config(num_blocks=None, kv_memory_bytes=4500).blocks(1000) == 4
    with pytest.raises(ValueError, match="one block needs 1000"):
        config(num_blocks=None, kv_memory_bytes=999).blocks(1000)
