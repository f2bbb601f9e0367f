"""The few file operations that tiers are made of, one step each, so that a test can fail or crash between any two of them.

Paths in, bytes in and out; no handle survives a call, so a file may be unlinked at any time. Raises `OSError` and nothing else.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from workers.kv_store.pages import collapse, map_file
from workers.kv_transfer.base import KVArray

MAX_BUFFERS_A_WRITE = 512  # below every system's IOV_MAX


class Files:
    """The real ones."""

    def make_dir(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def list_dir(self, path: Path) -> list[str]:
        """Names in a directory, sorted; empty when there is no such directory."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: Path) -> int | None:
        """Bytes of a file, None when there is none."""
        try:
            return path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def append(self, path: Path, buffers: Sequence[bytes | KVArray]) -> None:
        """Write at the end of a file, which is created if need be. After an error any part of it may have been written."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            for start in range(0, len(buffers), MAX_BUFFERS_A_WRITE):
                _write_all(handle, buffers[start : start + MAX_BUFFERS_A_WRITE])
        finally:
            os.close(handle)

    def sync(self, path: Path) -> None:
        """Return when a file's, or a directory's, content would survive a power cut."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def read(self, path: Path, offset: int, count: int) -> KVArray:
        """Up to `count` bytes from `offset`; fewer when the file is shorter."""
        buffer = np.empty(count, dtype=np.uint8)
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < count:
                step = os.preadv(handle, [buffer.data[done:]], offset + done)
                if step == 0:
                    break
                done += step
        finally:
            os.close(handle)
        return buffer[:done]

    def map(self, path: Path, count: int) -> KVArray:
        """Up to the first `count` bytes of a file in memory, as its own pages; they stay valid when the file is unlinked."""
        return map_file(path, count)

    def collapse(self, path: Path) -> None:
        """Make a file in memory cheap to map, where that can be had."""
        collapse(path)

    def publish(self, temporary: Path, path: Path) -> None:
        """Give a complete file its name, in one step for everybody."""
        os.replace(temporary, path)

    def will_need(self, path: Path, offset: int, count: int) -> None:
        """Let the operating system begin to read."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(handle, offset, count, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(handle)

    def forget_pages(self, path: Path) -> None:
        """Ask the operating system to drop a synced file from its page cache."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def touch(self, path: Path, at_s: float) -> None:
        os.utime(path, (at_s, at_s))

    def modified_s(self, path: Path) -> float | None:
        try:
            return path.stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return None


class LockFile:
    """A lock on a file, exclusive or shared, held by whoever opened it, and gone with its process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    @property
    def closed(self) -> bool:
        return self._file.closed

    def is_at(self, path: Path) -> bool:
        """Whether `path` still names the file that was opened."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), path.stat())
        except OSError:
            return False

    def acquire(self, *, wait: bool = True, shared: bool = False) -> bool:
        """A shared lock becomes exclusive, or is lost if that fails."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self._file, kind if wait else kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    def release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Also releases. Again changes nothing."""
        self._file.close()


def _write_all(handle: int, buffers: Sequence[bytes | KVArray]) -> None:
    views = [memoryview(buffer if isinstance(buffer, bytes) else buffer.data).cast("B") for buffer in buffers]
    while views:
        done = os.writev(handle, views)
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if done:
            views[0] = views[0][done:]
