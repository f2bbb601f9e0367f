"""File operations as slow as they are asked to be: a labelled throttle for tests and demonstrations, never a measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from workers.kv_store.files import Files
from workers.kv_transfer.base import KVArray


class ThrottledFiles(Files):
    """Each read and write takes at least its bytes over `bytes_per_s`."""

    def __init__(self, bytes_per_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self._bytes_per_s, self._sleep = bytes_per_s, sleep

    def append(self, path: Path, buffers: Sequence[bytes | KVArray]) -> None:
        self._wait(sum(len(buffer) if isinstance(buffer, bytes) else buffer.nbytes for buffer in buffers))
        super().append(path, buffers)

    def read(self, path: Path, offset: int, count: int) -> KVArray:
        data = super().read(path, offset, count)
        self._wait(len(data))
        return data

    def _wait(self, nbytes: int) -> None:
        self._sleep(nbytes / self._bytes_per_s)
