"""Bad days of the tiers that live in files: crashes between any two steps, damage, a full, broken, read-only or lost disk."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.kv_store.conftest import MAKERS, RECORD_BYTES, MakeTier, make_disk, make_shared
from tests.workers.kv_store.doubles import FORMAT, CrashedError, FaultyFiles, chain, damage, new_blocks
from tests.workers.kv_store.test_tiers import read
from workers.kv_store.base import KVStoreError
from workers.kv_store.blobs import STALE_S, TEMPORARY
from workers.kv_store.records import HEADER_BYTES


def payload_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix in (".seg", ".kv") and path.stat().st_size)


def flip_payload(data: bytearray) -> None:
    data[HEADER_BYTES + 9] ^= 1


def flip_header(data: bytearray) -> None:
    data[30] ^= 1


def truncate(data: bytearray) -> None:
    del data[HEADER_BYTES + 20 :]


@pytest.mark.parametrize("change", [flip_payload, flip_header, truncate])
def test_damage_is_never_served(make_tier: MakeTier, tmp_path: Path, change: Callable[[bytearray], None]) -> None:
    """A flipped bit or a lost tail in every file: quarantined, counted, told as removed, and a miss, until stored again."""
    tier = make_tier()
    names = chain(0, 3)
    tier.put(new_blocks(names))
    tier.drain_changes()
    for path in payload_files(tmp_path):
        damage(path, change)
    assert read(tier, names) == 0
    assert tier.stats().quarantined >= 1
    assert names[0] in {name for event in tier.drain_changes() for name in event.blocks}
    for _ in names:
        tier.put(new_blocks(names))
        read(tier, names)
    assert read(tier, names) == 3


def test_damage_found_after_a_restart_is_never_served(tmp_path: Path) -> None:
    """What was stored again after damage stands after the next start, too."""
    tier = make_disk(tmp_path)
    names = chain(0, 2)
    tier.put(new_blocks(names))
    damage(payload_files(tmp_path)[0], flip_payload)
    assert read(tier, names) == 0
    tier.put(new_blocks(names))
    tier.close()
    again = make_disk(tmp_path)
    assert read(again, names) == 2
    again.close()


def test_a_record_of_another_format_in_our_directory_is_refused(tmp_path: Path) -> None:
    """A file that was copied from another namespace's directory is no block of ours."""
    from dataclasses import replace

    names = chain(0, 1)
    other = make_shared(tmp_path / "other", block_format=replace(FORMAT, namespace="model-b"))
    other.put(new_blocks(names))
    ours = make_shared(tmp_path / "ours")
    source = payload_files(tmp_path / "other")[0]
    stripe = source.relative_to(tmp_path / "other").parts[0]
    target = tmp_path / "ours" / stripe / FORMAT.fingerprint.hex() / source.parent.name
    target.mkdir(parents=True)
    shutil.copy(source, target)
    assert ours.match(names) == 1
    assert (read(ours, names), ours.stats().quarantined, ours.match(names)) == (0, 1, 0)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing_is_still_read(make_tier: MakeTier, error: int, caplog: pytest.LogCaptureFixture) -> None:
    """Full, read-only, broken: said in the log and in the stats, nothing raised, nothing claimed that is not there."""
    files = FaultyFiles()
    tier = make_tier(files=files)
    tier.put(new_blocks(chain(0, 2)))
    files.write_error = error
    assert tier.put(new_blocks(chain(0, 5))) == 0
    assert errno.errorcode[error] in (tier.stats().failure or "")
    assert "takes nothing" in caplog.text
    assert read(tier, chain(0, 5)) == 2
    files.write_error = None
    assert tier.put(new_blocks(chain(0, 5))) == 0  # not yet tried again
    tier._clock.now_s += 60.0  # type: ignore[attr-defined]
    assert tier.put(new_blocks(chain(0, 5))) == 3
    assert tier.stats().failure is None


def test_a_disk_that_cannot_be_read_is_a_miss(make_tier: MakeTier) -> None:
    files = FaultyFiles()
    tier = make_tier(files=files)
    tier.put(new_blocks(chain(0, 2)))
    files.read_error = errno.EIO
    assert read(tier, chain(0, 2)) == 0


def test_a_deleted_directory_is_an_empty_tier(make_tier: MakeTier, tmp_path: Path) -> None:
    """Someone removes the store under a running worker: misses, and claims that are taken back."""
    tier = make_tier()
    tier.put(new_blocks(chain(0, 3)))
    tier.drain_changes()
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    assert read(tier, chain(0, 3)) == 0
    assert chain(0, 3)[0] in {name for change in tier.drain_changes() for name in change.blocks}


def test_what_a_dead_writer_had_begun_is_removed_in_time(tmp_path: Path) -> None:
    """A file that nobody finished goes an hour later with the next look at the store; one that is being written stays."""
    tier = make_shared(tmp_path)
    tier.put(new_blocks(chain(0, 3)))
    (kept, *_) = tmp_path.rglob("*.kv")
    stale, fresh = (kept.with_name(f"{TEMPORARY}{name}") for name in ("stale", "fresh"))
    for path in (stale, fresh):
        path.write_bytes(b"half of a block")
    long_ago_s = time.time() - STALE_S - 60
    os.utime(stale, (long_ago_s, long_ago_s))
    assert len(make_shared(tmp_path).snapshot()) == 3
    assert (stale.exists(), fresh.exists()) == (False, True)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KVStoreError, match="file"):
        make_disk(tmp_path / "file" / "below")


def test_a_capacity_below_one_block_is_named(tmp_path: Path) -> None:
    for make in (make_disk, make_shared):
        with pytest.raises(KVStoreError, match="one block needs"):
            make(tmp_path, blocks=0)


def test_disk_space_is_bounded(tmp_path: Path) -> None:
    """However much is stored, the files stay near the capacity: whole segments are deleted."""
    tier = make_disk(tmp_path, blocks=24)
    for branch in range(60):
        tier.put(new_blocks(chain(branch, 5)))
    assert tier.stats().used_bytes <= (24 + 4) * RECORD_BYTES
    assert len(payload_files(tmp_path)) <= 8
    tier.close()


def test_what_a_start_finds_beyond_the_capacity_is_evicted(tmp_path: Path) -> None:
    """As after a smaller capacity was configured, or where evicted blocks lie in segments that were still to be deleted."""
    tier = make_disk(tmp_path, blocks=16)
    tier.put(new_blocks(chain(0, 14)))
    tier.close()
    again = make_disk(tmp_path, blocks=8)
    assert len(again.snapshot()) == read(again, chain(0, 14)) == int(0.85 * 8)
    again.close()


def test_a_bucket_is_a_shared_store(tmp_path: Path) -> None:
    """The same tier over an fsspec URL."""
    pytest.importorskip("fsspec")
    from workers.kv_store.shared_directory import SharedDirectoryTier

    tier = SharedDirectoryTier([f"local://{tmp_path}/bucket"], FORMAT, 20 * RECORD_BYTES)
    assert tier.put(new_blocks(chain(0, 4))) == 4
    assert read(tier, chain(0, 6)) == 4
    assert tier.remove(chain(0, 4)[1:]) == 3
    assert tier.match(chain(0, 4)) == 1


steps = st.lists(
    st.tuples(st.sampled_from(["put", "put", "put", "read", "remove"]), st.integers(0, 5), st.integers(1, 7)),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("kind", sorted(MAKERS))
@settings(max_examples=60, deadline=None)
@given(lives=st.lists(st.tuples(steps, st.integers(0, 40)), min_size=1, max_size=4), seed=st.integers(0, 9))
def test_a_crash_between_any_two_steps_loses_blocks_but_never_gives_wrong_ones(
    kind: str, lives: list[tuple[list[tuple[str, int, int]], int]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Several lives of one store, each cut short at some step, against a set of everything ever stored.

    In every life: what is read is what was stored under that name, a match is contiguous, reads agree with matches, capacity
    holds, and once a put has returned and was told, it is there for as long as nothing is evicted or removed.
    """
    path = tmp_path_factory.mktemp("store")
    ever: set[int] = set()
    for number, (operations, crash_after) in enumerate(lives):
        files = FaultyFiles(seed=seed + number)
        tier = MAKERS[kind](path, 16, FORMAT, files)
        assert set(tier.snapshot()) <= ever
        files.crash_after = crash_after
        try:
            for what, branch, depth in operations:
                names = chain(branch, depth)
                if what == "put":
                    ever.update(names)
                    tier.put(new_blocks(names))
                elif what == "remove":
                    tier.remove(names[-1:])
                else:
                    assert read(tier, names) == tier.match(names)
                assert len(tier.snapshot()) <= 16
        except CrashedError:
            continue
        finally:
            tier.close()
    final = MAKERS[kind](path, 16, FORMAT, None)
    for branch in range(6):
        depth = read(final, chain(branch, 7))
        assert depth == final.match(chain(branch, 7))
    final.close()
