"""The tier in a host's DRAM: one file a block in a memory file system, which every worker of the host maps instead of copying.

A block that one worker has computed is read by the next through a mapping of the same pages. Readers take no lock, for a
mapping outlives the name of its file; writers of a host take turns, so capacity and closure hold exactly. What a writer left
half-written when it died is swept by the next one that opens the tier.

The directory belongs to the processes that have it open, whoever made it: each holds a shared lock on its file `owners`, the
last one to close removes the directory, and where all were killed, the next process that opens any tier of this user does.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from conductor.core.types import Tier
from workers.kv_store.base import BlockFormat, KVStoreError
from workers.kv_store.blob_tier import QUARANTINE, SUFFIX, BlobLimits, BlobTier
from workers.kv_store.blobs import TEMPORARY, MappedBlobs
from workers.kv_store.files import Files, LockFile
from workers.kv_store.retention import RetentionPolicy

MEMORY_ROOT = Path("/dev/shm")
BLOCKS = "blocks"
OWNERS = "owners"
TOUCH_EVERY_S = 1.0
DEAD = ".dead-"


class SharedMemoryTier(BlobTier):
    """All processes of one host that name the same `directory`."""

    tier = Tier.HOST
    directories = (BLOCKS,)

    def __init__(
        self,
        directory: Path,
        block_format: BlockFormat,
        capacity_bytes: int,
        retention: RetentionPolicy | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        limits = BlobLimits(capacity_bytes, retention or RetentionPolicy(), touch_every_s=TOUCH_EVERY_S)
        self._files, self._blobs = files or Files(), MappedBlobs(directory, files or Files())
        super().__init__(block_format, [self._blobs], limits, clock)
        try:
            self._owned = OwnedDirectory(directory)
            self._turn = LockFile(directory / "writer")
            with self._writing():
                self._describe()
                self._sweep(directory / self._prefix)
        except OSError as error:
            raise KVStoreError(f"the host tier cannot be opened in {directory}: {error}") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One writer of the host at a time; the lock goes with its process."""
        with self._lock:
            self._turn.acquire()
            try:
                yield
            finally:
                self._turn.release()

    def _sweep(self, root: Path) -> None:
        """Delete what writers left unfinished, which is nobody's while the writers' lock is held, and what was damaged."""
        for name in self._files.list_dir(root / BLOCKS):
            if name.startswith(TEMPORARY):
                self._files.unlink(root / BLOCKS / name)
        for name in self._blobs.list(f"{self._prefix}/{QUARANTINE}"):
            if name.endswith(SUFFIX):
                self._files.unlink(root / QUARANTINE / name)

    def close(self) -> None:
        """The last of the host takes the memory with it."""
        self._turn.close()
        self._owned.close()


class OwnedDirectory:
    """A directory that lives as long as any process that holds it. Making one removes those that nobody holds any more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_ownerless(path.parent)
        self._lock = self._take_part()

    def _take_part(self) -> LockFile:
        while True:
            self._path.mkdir(mode=0o700, exist_ok=True)
            lock = LockFile(self._path / OWNERS)
            lock.acquire(shared=True)
            if lock.is_at(self._path / OWNERS):
                return lock
            lock.close()  # its last owner has removed it meanwhile

    def close(self) -> None:
        """Again changes nothing."""
        if not self._lock.closed:
            if self._lock.acquire(wait=False):
                _remove(self._path)
            self._lock.close()


def host_directory(deployment: str, node: str, root: Path = MEMORY_ROOT) -> Path:
    """Where the workers of one deployment on one host keep their blocks."""
    return root / f"kv-conductor-{os.getuid()}" / f"{deployment}@{node}"


def remove_ownerless(parent: Path) -> int:
    """Remove the directories in `parent` whose owners are all dead; how many."""
    removed = 0
    for path in [entry for entry in sorted(parent.iterdir()) if entry.is_dir()] if parent.is_dir() else []:
        if DEAD in path.name:
            shutil.rmtree(path, ignore_errors=True)
        elif (path / OWNERS).exists():
            with suppress(OSError):
                lock = LockFile(path / OWNERS)
                if lock.acquire(wait=False) and lock.is_at(path / OWNERS):
                    _remove(path)
                    removed += 1
                lock.close()
    return removed


def _remove(path: Path) -> None:
    """Out of sight first, in one step, so that who opens it at the same time makes a new one."""
    dead = path.with_name(f"{path.name}{DEAD}{os.getpid():x}-{threading.get_ident():x}-{time.monotonic_ns():x}")
    with suppress(FileNotFoundError):
        path.rename(dead)
    shutil.rmtree(dead, ignore_errors=True)
