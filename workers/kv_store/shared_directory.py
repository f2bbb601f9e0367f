"""The tier that every node sees: one file a block in one or several directories of any mount, or in buckets.

    PATH / format fingerprint / first two digits of the hash / the hash

A block's path is chosen by its hash, so several mounts share the load. No lock is held across nodes: two writers of one name
write the same bytes, and two who evict at once take the same blocks. Last use is noted at most once an hour, and how full the
store is looked at once every 64th of its capacity, for both cost a round trip to a file server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from conductor.core.types import Tier
from workers.kv_store.base import BlockFormat, KVStoreError
from workers.kv_store.blob_tier import BlobLimits, BlobTier
from workers.kv_store.blobs import open_blobs
from workers.kv_store.files import Files
from workers.kv_store.retention import RetentionPolicy

SLACK_SHARE = 1 / 64
TOUCH_EVERY_S = 3600.0


class SharedDirectoryTier(BlobTier):
    """Any number of processes and nodes. `paths` are directories or URLs, the same list for everybody."""

    tier = Tier.SHARED
    directories = tuple(f"{number:02x}" for number in range(256))

    def __init__(
        self,
        paths: Sequence[str],
        block_format: BlockFormat,
        capacity_bytes: int,
        retention: RetentionPolicy | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not paths:
            raise KVStoreError("store.shared_paths is empty; name at least one directory or URL")
        stripes = [open_blobs(path, files or Files()) for path in paths]
        limits = BlobLimits(capacity_bytes, retention or RetentionPolicy(), SLACK_SHARE, TOUCH_EVERY_S)
        super().__init__(block_format, stripes, limits, clock)
        try:
            self._describe()
        except OSError as error:
            raise KVStoreError(f"the shared tier cannot be opened in {', '.join(paths)}: {error}") from error
