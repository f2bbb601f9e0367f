"""Touches pages of Ray's object store ahead of their use.

The store is shared memory that every process maps for itself. Its pages come into being, one fault each, when they are first
written, and enter each process's page table when it first reaches them; together this takes many times as long as copying KV
there. The kernel does both for a whole range at once, with large pages where it may (madvise, Linux 5.14). The store hands out
low addresses first, so touching its beginning covers what a worker uses. Where anything of this is missing, nothing changes but
the speed of the first transfers.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from pathlib import Path

import numpy as np
import ray

logger = logging.getLogger(__name__)

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_IN_STORE_BYTES = 1 << 20  # an object of this size is kept in the store, not in its owner's memory
_MAPS = Path("/proc/self/maps")


def touch_store(nbytes: int) -> int:
    """Map the first `nbytes` of this node's store into this process; how many bytes were."""
    ray.get(ray.put(np.zeros(_IN_STORE_BYTES, np.uint8)))  # maps the store
    start, stop = max(_store_mappings(), key=lambda span: span[1] - span[0], default=(0, 0))
    length = min(nbytes, stop - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if not length:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    area = ctypes.c_void_p(start), ctypes.c_size_t(length)
    libc.madvise(*area, _MADV_HUGEPAGE)
    if libc.madvise(*area, _MADV_POPULATE_WRITE):
        logger.info("the object store's pages could not be touched: errno %d", ctypes.get_errno())
        return 0
    return length


def _store_mappings() -> list[tuple[int, int]]:
    if not _MAPS.is_file():
        return []
    spans = [line.split()[0] for line in _MAPS.read_text().splitlines() if "/plasma" in line and " rw-s " in line]
    return [(int(start, 16), int(stop, 16)) for start, stop in (span.split("-") for span in spans)]
