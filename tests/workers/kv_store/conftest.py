"""One small tier of each kind, made anew as often as a test likes on the same directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.workers.kv_store.doubles import BLOCK_BYTES, FORMAT, Clock
from workers.kv_store.base import BlockFormat, KVTier
from workers.kv_store.disk import DiskLimits, DiskTier
from workers.kv_store.files import Files
from workers.kv_store.records import HEADER_BYTES
from workers.kv_store.shared_directory import SharedDirectoryTier
from workers.kv_store.shared_memory import SharedMemoryTier

RECORD_BYTES = HEADER_BYTES + BLOCK_BYTES
MakeTier = Callable[..., KVTier]


def make_disk(path: Path, blocks: int = 40, block_format: BlockFormat = FORMAT, files: Files | None = None) -> KVTier:
    limits = DiskLimits(blocks * RECORD_BYTES, segment_bytes=4 * RECORD_BYTES)
    return DiskTier(path, block_format, limits, files, Clock())


def make_shared(path: Path, blocks: int = 40, block_format: BlockFormat = FORMAT, files: Files | None = None) -> KVTier:
    paths = [str(path / "a"), str(path / "b")]
    return SharedDirectoryTier(paths, block_format, blocks * RECORD_BYTES, None, files, Clock())


def make_host(path: Path, blocks: int = 40, block_format: BlockFormat = FORMAT, files: Files | None = None) -> KVTier:
    """In a directory of any file system, as it would be in memory."""
    return SharedMemoryTier(path / "host" / "tier", block_format, blocks * RECORD_BYTES, None, files, Clock())


MAKERS: dict[str, MakeTier] = {"disk": make_disk, "host": make_host, "shared": make_shared}


@pytest.fixture(params=sorted(MAKERS))
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeTier]:
    made: list[KVTier] = []

    def make(blocks: int = 40, block_format: BlockFormat = FORMAT, files: Files | None = None) -> KVTier:
        made.append(MAKERS[request.param](tmp_path, blocks, block_format, files))
        return made[-1]

    yield make
    for tier in made:
        tier.close()
