"""Tiers on a file system that is really full: a small one in memory, mounted for the test."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.kv_store.conftest import MAKERS
from tests.workers.kv_store.doubles import chain, new_blocks
from tests.workers.kv_store.test_tiers import read

SIZE_KIB, ROOM_KIB = 1024, 12


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_KIB}k", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a file system takes privileges that this user lacks: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_a_file_system_without_room_takes_what_fits(kind: str, small_disk: Path) -> None:
    """The kernel's own refusal, in the middle of a group: what is claimed is there and right, nothing is left half-written, and
    once there is room again, writing goes on."""
    tier = MAKERS[kind](small_disk)
    filler = small_disk / "filler"
    free = shutil.disk_usage(small_disk).free
    filler.write_bytes(bytes(free - 1024 * ROOM_KIB))
    names = chain(0, 30)
    stored = tier.put(new_blocks(names))
    assert 0 < stored < len(names)
    assert "No space left" in (tier.stats().failure or "")
    assert read(tier, names) == tier.match(names) == stored
    assert not [path for path in small_disk.rglob(".tmp-*") if path.is_file()]
    filler.unlink()
    tier._clock.now_s += 60.0  # type: ignore[attr-defined]
    tier.put(new_blocks(names))
    assert (read(tier, names), tier.stats().failure) == (len(names), None)
    tier.close()
