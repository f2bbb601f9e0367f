"""What the tiers of one worker are made of. A capacity of 0, or a directory that is not named, means that there is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from workers.kv_store.retention import RetentionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """`deployment` names the workers that share a host's memory. `queue_blocks` bounds what waits to be written to one tier.

    `disk_bytes` bounds what this worker keeps on disk, `host_bytes` and `shared_bytes` the whole tier.
    Every `look_interval_s` a worker looks whether other clusters have changed the shared tier.
    `throttle_bytes_per_s` slows every read and write of disk and shared tier down, for tests and demonstrations.
    """

    deployment: str = "default"
    host_bytes: int = 0
    disk_directory: Path | None = None
    disk_bytes: int = 0
    shared_paths: tuple[str, ...] = ()
    shared_bytes: int = 0
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    queue_blocks: int = 4096
    throttle_bytes_per_s: float | None = None
    report_interval_s: float = 1.0
    look_interval_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes", "shared_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"store.{name} is {getattr(self, name)!r}; it must be at least 0")
        if not self.report_interval_s > 0:
            raise ValueError(f"store.report_interval_s is {self.report_interval_s!r}; it must be above 0")
        if self.queue_blocks < 1:
            raise ValueError(f"store.queue_blocks is {self.queue_blocks!r}; it must be at least 1")
        if self.throttle_bytes_per_s is not None and not self.throttle_bytes_per_s > 0:
            raise ValueError(f"store.throttle_bytes_per_s is {self.throttle_bytes_per_s!r}; it must be above 0, or None")
