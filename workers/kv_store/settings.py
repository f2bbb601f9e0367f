"""What the tiers of one worker are made of. A capacity of 0, or a directory that is not named, means that there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.kv_layout import FORMATS
from workers.kv_store.retention import DAY_S, RetentionPolicy

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """`deployment` names the workers that share a host's memory. `queue_blocks` bounds what waits to be written to one tier.

    `disk_bytes` bounds what this worker keeps on disk, `host_bytes` and `shared_bytes` the whole tier.
    `codec` is the number format of blocks on disk and in the shared tier (None: as they are cached).
    `replay_windows` 0: the shared tier keeps the state of all layers. Above 0: not that of sliding-window layers, which is
    rebuilt by replaying so many windows; as many as there are such layers make it exact.
    Every `look_interval_s` a worker looks whether others have changed what a tier holds, and tells what.
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
    codec: str | None = None
    replay_windows: int = 0
    throttle_bytes_per_s: float | None = None
    report_interval_s: float = 2.0
    look_interval_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes", "shared_bytes", "replay_windows"):
            if getattr(self, name) < 0:
                raise ValueError(f"store.{name} is {getattr(self, name)!r}; it must be at least 0")
        if not self.report_interval_s > 0:
            raise ValueError(f"store.report_interval_s is {self.report_interval_s!r}; it must be above 0")
        if self.queue_blocks < 1:
            raise ValueError(f"store.queue_blocks is {self.queue_blocks!r}; it must be at least 1")
        if self.codec is not None and self.codec not in FORMATS:
            raise ValueError(f"store.codec is {self.codec!r}; allowed: {', '.join(FORMATS)}")
        if self.throttle_bytes_per_s is not None and not self.throttle_bytes_per_s > 0:
            raise ValueError(f"store.throttle_bytes_per_s is {self.throttle_bytes_per_s!r}; it must be above 0, or None")


def settings_from(section: Mapping[str, Any], deployment: str) -> StoreSettings:
    """The settings that the section `store` of a configuration asks for. Raises `ValueError`."""
    days = {name: section[f"{name}_retention_days"] * DAY_S for name in ("agent", "chat", "other")}
    throttle = section["throttle_mib_per_s"]
    return StoreSettings(
        deployment=deployment,
        host_bytes=section["host_mib"] * MIB,
        disk_directory=section["disk_directory"],
        disk_bytes=section["disk_mib"] * MIB,
        shared_paths=tuple(section["shared_paths"]),
        shared_bytes=section["shared_mib"] * MIB,
        retention=RetentionPolicy(section["high_watermark"], section["low_watermark"], days, days["other"]),
        queue_blocks=section["queue_blocks"],
        codec=section["codec"],
        replay_windows=section["replay_windows"],
        look_interval_s=section["look_interval_s"],
        throttle_bytes_per_s=None if throttle is None else throttle * MIB,
    )
