"""Host memory shared by processes: mapped rather than copied, bounded for all of them together, and gone with the last one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.workers.kv_store.conftest import RECORD_BYTES
from tests.workers.kv_store.doubles import FORMAT, KV, chain, content, new_blocks
from tests.workers.kv_store.test_tiers import read
from workers.kv_store.base import BlockFormat, NewBlock
from workers.kv_store.blobs import TEMPORARY
from workers.kv_store.shared_memory import OwnedDirectory, SharedMemoryTier, host_directory, remove_ownerless

CHILD = """
import os, signal, sys
from pathlib import Path
from tests.workers.kv_store.doubles import FORMAT, chain, new_blocks
from tests.workers.kv_store.conftest import RECORD_BYTES
from workers.kv_store.shared_memory import SharedMemoryTier
tier = SharedMemoryTier(Path(sys.argv[1]), FORMAT, 40 * RECORD_BYTES)
tier.put(new_blocks(chain(0, 5)))
print("stored", flush=True)
sys.stdin.readline()
tier.close()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """In real shared memory; whatever a test does to its processes, nothing of it may be left."""
    path = host_directory(f"test-{os.getpid()}", "node")
    yield path
    remove_ownerless(path.parent)
    assert not path.exists()


def tier_in(directory: Path, blocks: int = 40) -> SharedMemoryTier:
    return SharedMemoryTier(directory, FORMAT, blocks * RECORD_BYTES)


def other_process(directory: Path) -> subprocess.Popen[str]:
    """A process that has stored a prefix and holds the tier open."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "stored\n"
    return child


def test_what_another_process_stored_is_mapped(directory: Path) -> None:
    """The rows are views of the file's own pages, and stay right when the block is evicted and its file is gone."""
    child = other_process(directory)
    tier = tier_in(directory)
    names = chain(0, 5)
    with tier.read(names) as rows:
        assert not any(row.flags.owndata or row.flags.writeable for row in rows)
        tier.remove(names[:1])
        assert tier.snapshot() == ()
        assert all((row == content(name)).all() for name, row in zip(names, rows, strict=True))
    child.communicate("\n")
    tier.close()


def test_blocks_larger_than_a_huge_page_are_mapped_as_well(directory: Path) -> None:
    """Whether or not the kernel has huge pages to give, the bytes are the block's, and damage is found."""
    kv = replace(KV, layer_block_bytes=3 << 19)
    large = BlockFormat("large", kv)
    tier = SharedMemoryTier(directory, large, 64 << 20)
    data = np.random.default_rng(1).integers(0, 256, large.block_bytes, dtype=np.uint8)
    names = chain(0, 2)
    assert tier.put([NewBlock(names[0], None, data), NewBlock(names[1], names[0], data[::-1].copy())]) == 2
    with tier.read(names) as rows:
        assert [np.array_equal(row, wanted) for row, wanted in zip(rows, (data, data[::-1]), strict=True)] == [True, True]
        assert not any(row.flags.writeable for row in rows)
    for path in directory.rglob("*.kv"):
        os.truncate(path, (2 << 20) + 5)
    assert tier.match(names) == 2
    with tier.read(names) as rows:
        assert rows == []
    assert tier.stats().quarantined == 1
    tier.close()


def test_a_killed_process_takes_nothing_with_it(directory: Path) -> None:
    """Blocks of a dead owner are served for as long as somebody else has the tier open."""
    child = other_process(directory)
    tier = tier_in(directory)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert read(tier, chain(0, 5)) == 5
    assert tier.put(new_blocks(chain(0, 7))) == 2
    tier.close()
    assert not directory.exists()


def test_memory_of_dead_owners_is_reclaimed(directory: Path) -> None:
    """Everybody was killed: the next one that opens any tier of this user removes what they left, and nothing that lives."""
    child = other_process(directory)
    living = OwnedDirectory(directory.with_name("living"))
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert directory.exists()
    other = OwnedDirectory(directory.with_name("other"))
    assert not directory.exists()
    assert directory.with_name("living").exists()
    for owned in (living, other):
        owned.close()


def test_what_a_dead_writer_left_unfinished_is_swept(directory: Path) -> None:
    first = tier_in(directory)
    first.put(new_blocks(chain(0, 2)))
    blocks = directory / FORMAT.fingerprint.hex() / "blocks"
    (blocks / f"{TEMPORARY}77-1-1").write_bytes(b"half a block")
    second = tier_in(directory)
    assert not [name for name in os.listdir(blocks) if name.startswith(TEMPORARY)]
    assert read(second, chain(0, 2)) == 2
    first.close()
    second.close()


def test_capacity_holds_for_all_writers_together(directory: Path) -> None:
    """Two processes' worth of writers, each storing more than fits: never more than the capacity, and no holes."""
    first, second = tier_in(directory, 20), tier_in(directory, 20)
    for branch in range(12):
        (first, second)[branch % 2].put(new_blocks(chain(branch, 6)))
        assert len(first.snapshot()) <= 20
        for other in range(branch + 1):
            assert read(first, chain(other, 6)) == second.match(chain(other, 6))
    first.close()
    assert directory.exists()
    second.close()


def test_a_pinned_tier_takes_what_fits_and_no_more(directory: Path) -> None:
    """Where nothing may be evicted, capacity holds all the same."""
    tier = tier_in(directory, 6)
    tier.put(new_blocks(chain(0, 5)))
    tier.pin(chain(0, 5))
    assert tier.put(new_blocks(chain(1, 7))) == 1
    assert len(tier.snapshot()) == 6
    tier.close()


def test_closing_again_changes_nothing(directory: Path) -> None:
    tier = tier_in(directory)
    tier.close()
    tier.close()
