"""Where a shared store keeps whole files: a mounted directory, or a bucket through fsspec. No locks, any number of writers.

A file appears complete or not at all: on a mount it is written beside its place and renamed into it, in a bucket an object is
put in one piece. Two writers of one name write the same bytes, so it does not matter who wins.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from workers.kv_store.base import KVStoreError
from workers.kv_store.files import Files
from workers.kv_transfer.base import KVArray

TEMPORARY = ".tmp-"
MAPPED_FROM_BYTES = 128  # a header alone is read
STALE_S = 3600.0  # no writer needs so long for a file


class Blobs(Protocol):
    """Names are relative, with `/` between directory and file."""

    def write(self, name: str, buffers: Sequence[bytes | KVArray]) -> None:
        """Publish a file in one step, or change nothing."""

    def read(self, name: str, offset: int, count: int) -> KVArray | None:
        """Up to `count` bytes; None when there is no such file."""

    def expect(self, name: str) -> None:
        """The file is about to be read. Unknown names are ignored."""

    def modified_s(self, name: str) -> float | None:
        """Unix time of the last write or touch; None when there is no such file."""

    def touch(self, name: str, at_s: float) -> None: ...

    def delete(self, name: str) -> None:
        """Unknown names are ignored."""

    def list(self, directory: str) -> list[str]:
        """Names of the files in a directory, without those that are being written."""


class MountedBlobs:
    """Files below a directory of any mounted file system. `sync` waits until a file would survive a power cut."""

    def __init__(self, root: Path, files: Files, *, sync: bool = False) -> None:
        self._root, self._files, self._sync = root, files, sync
        self._made: set[Path] = set()

    def write(self, name: str, buffers: Sequence[bytes | KVArray]) -> None:
        path = self._root / name
        temporary = path.with_name(f"{TEMPORARY}{os.getpid():x}-{threading.get_ident():x}-{time.monotonic_ns():x}")
        if path.parent not in self._made:
            self._files.make_dir(path.parent)
        try:
            self._files.append(temporary, buffers)
            self._finish(temporary)
            self._files.publish(temporary, path)
        except OSError:
            self._files.unlink(temporary)
            raise
        self._made.add(path.parent)

    def _finish(self, temporary: Path) -> None:
        """A file is written and not yet seen by anybody."""
        if self._sync:
            self._files.sync(temporary)

    def read(self, name: str, offset: int, count: int) -> KVArray | None:
        try:
            return self._files.read(self._root / name, offset, count)
        except FileNotFoundError:
            return None

    def expect(self, name: str) -> None:
        with suppress(OSError):
            self._files.will_need(self._root / name, 0, 0)

    def modified_s(self, name: str) -> float | None:
        return self._files.modified_s(self._root / name)

    def touch(self, name: str, at_s: float) -> None:
        self._files.touch(self._root / name, at_s)

    def delete(self, name: str) -> None:
        self._files.unlink(self._root / name)

    def list(self, directory: str) -> list[str]:
        """Also removes what a writer had begun when it died, once it is certain that nobody goes on with it."""
        found = self._files.list_dir(self._root / directory)
        for name in found:
            if name.startswith(TEMPORARY):
                self._remove_stale(self._root / directory / name)
        return [name for name in found if not name.startswith(TEMPORARY)]

    def _remove_stale(self, temporary: Path) -> None:
        with suppress(OSError):  # the mount may be read-only, and another reader quicker
            written_s = self._files.modified_s(temporary)
            if written_s is not None and time.time() - written_s > STALE_S:
                self._files.unlink(temporary)


class MappedBlobs(MountedBlobs):
    """Files in memory: reading whole ones maps their pages, which nobody changes once a file is published."""

    def _finish(self, temporary: Path) -> None:
        self._files.collapse(temporary)

    def expect(self, name: str) -> None:
        return None

    def read(self, name: str, offset: int, count: int) -> KVArray | None:
        if offset or count < MAPPED_FROM_BYTES:
            return super().read(name, offset, count)
        try:
            return self._files.map(self._root / name, count)
        except FileNotFoundError:
            return None


class BucketBlobs:
    """Objects below a URL that fsspec understands. A bucket keeps no access times: touching does nothing."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise KVStoreError(f"store path {url!r} is a URL; install fsspec and its back end for that protocol") from error
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise KVStoreError(f"store path {url!r} cannot be used: {error}") from error

    def write(self, name: str, buffers: Sequence[bytes | KVArray]) -> None:
        path = self._path(name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, b"".join(buffer if isinstance(buffer, bytes) else buffer.tobytes() for buffer in buffers))

    def read(self, name: str, offset: int, count: int) -> KVArray | None:
        try:
            return np.frombuffer(self._fs.cat_file(self._path(name), start=offset, end=offset + count), dtype=np.uint8)
        except FileNotFoundError:
            return None

    def modified_s(self, name: str) -> float | None:
        try:
            info: dict[str, Any] = self._fs.info(self._path(name))
        except FileNotFoundError:
            return None
        stamp = info.get("mtime", info.get("LastModified", info.get("created", 0.0)))
        return float(stamp.timestamp() if hasattr(stamp, "timestamp") else stamp)

    def touch(self, name: str, at_s: float) -> None:
        return None

    def delete(self, name: str) -> None:
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def list(self, directory: str) -> list[str]:
        try:
            found = self._fs.ls(self._path(directory), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rpartition("/")[2] for path in found)

    def expect(self, name: str) -> None:
        return None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def open_blobs(path: str, files: Files) -> Blobs:
    """The blobs at a directory or URL."""
    return BucketBlobs(path) if "://" in path else MountedBlobs(Path(path).expanduser(), files)
