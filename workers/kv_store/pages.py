"""Files in memory, mapped at the price of few page-table entries: huge pages where the kernel can make them.

Mapping 94 MB in pages of 4 KiB costs as much time as copying them. A writer therefore asks the kernel to collapse a new file's
pages into huge ones (MADV_COLLAPSE, Linux 6.1, whatever the mode of transparent huge pages is), and a reader maps the file
where huge pages can be mapped whole. Where either is not to be had, ordinary pages do the same more slowly.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from workers.kv_transfer.base import KVArray

HUGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25
MAP_FIXED = 0x10


def collapse(path: Path) -> bool:
    """Ask for huge pages under a whole file; False where they are not to be had."""
    size = path.stat().st_size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if size == 0:
        return False
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        region, offset = _mapped(handle, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
    except OSError:
        return False
    finally:
        os.close(handle)
    return bool(_libc().madvise(_address(region) + offset, size, MADV_COLLAPSE) == 0)


def map_file(path: Path, count: int) -> KVArray:
    """Up to the first `count` bytes of a file as its own pages, read-only; they stay valid when the file is unlinked."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = min(count, os.fstat(handle).st_size)
        if size == 0:
            return np.empty(0, dtype=np.uint8)
        if size < HUGE_PAGE_BYTES:
            pages = mmap.mmap(handle, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
            return np.frombuffer(pages, dtype=np.uint8)
        region, offset = _mapped(handle, size, mmap.PROT_READ, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(handle)
    array: KVArray = np.frombuffer(region, dtype=np.uint8, count=size, offset=offset)
    array.flags.writeable = False
    return array


def _mapped(handle: int, size: int, protection: int, flags: int) -> tuple[mmap.mmap, int]:
    """A file mapped at a multiple of the huge page, inside of a region that is unmapped with its last user."""
    region = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    offset = -_address(region) % HUGE_PAGE_BYTES
    if _libc().mmap(_address(region) + offset, size, protection, flags | MAP_FIXED, handle, 0) == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return region, offset


def _address(region: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
