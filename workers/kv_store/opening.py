"""From settings to the tiers of one worker. A tier that cannot be opened is left out, and said so: in the log, and as a failure
that the worker reports.

Each opened tier comes with the speed at which it was seen to read, for the Conductor weighs restoring against computing. The
probe is a file that the operating system is asked to forget before it is read; a place that takes no probe is taken for slow.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from conductor.core.types import Tier
from workers.kv_store.base import BlockFormat, KVStoreError, KVTier
from workers.kv_store.disk import DiskLimits, DiskTier
from workers.kv_store.files import Files
from workers.kv_store.settings import StoreSettings
from workers.kv_store.shared_directory import SharedDirectoryTier
from workers.kv_store.shared_memory import MEMORY_ROOT, SharedMemoryTier, host_directory
from workers.kv_store.throttled_files import ThrottledFiles

logger = logging.getLogger(__name__)

PROBE_BYTES = 16 << 20
UNKNOWN_BYTES_PER_S = 100e6
MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class OpenedTiers:
    """Fastest first. `failures` says why a tier that was asked for is not there."""

    tiers: tuple[KVTier, ...] = ()
    bytes_per_s: Mapping[Tier, float] = field(default_factory=dict)
    failures: Mapping[Tier, str] = field(default_factory=dict)

    def speeds(self) -> tuple[float, ...]:
        """In order of `Tier`, 0 where nothing is known, as a cost profile lists them."""
        return tuple(self.bytes_per_s.get(tier, 0.0) for tier in Tier) if self.tiers else ()


def open_tiers(
    settings: StoreSettings, block_format: BlockFormat, node: str, at_rest: Mapping[Tier, BlockFormat] | None = None
) -> OpenedTiers:
    """`at_rest`: what the bytes of a tier mean, where that differs."""
    files = Files() if settings.throttle_bytes_per_s is None else ThrottledFiles(settings.throttle_bytes_per_s)
    tiers: list[KVTier] = []
    speeds: dict[Tier, float] = {}
    failures: dict[Tier, str] = {}
    formats = {tier: block_format for tier in Tier} | dict(at_rest or {})
    for tier, (make, place, tier_files) in _wanted(settings, formats, node, files).items():
        try:
            tiers.append(make())
            speeds[tier] = probe_bytes_per_s(place, tier_files)
        except KVStoreError as error:
            failures[tier] = str(error)
            logger.error("there is no %s tier: %s", tier.name.lower(), error)
    return OpenedTiers(tuple(tiers), speeds, failures)


def _wanted(
    settings: StoreSettings, formats: Mapping[Tier, BlockFormat], node: str, files: Files
) -> dict[Tier, tuple[Callable[[], KVTier], str, Files]]:
    """For each tier that is asked for: how to open it, and where and how its speed is measured."""
    memory, disk = host_directory(settings.deployment, node), settings.disk_directory
    wanted: dict[Tier, tuple[Callable[[], KVTier], str, Files]] = {}
    if settings.host_bytes:
        host_bytes = min(settings.host_bytes, memory_bytes(MEMORY_ROOT))
        wanted[Tier.HOST] = (
            lambda: SharedMemoryTier(memory, formats[Tier.HOST], host_bytes, settings.retention),
            str(memory),
            Files(),
        )
    if disk is not None and settings.disk_bytes:
        limits = DiskLimits(settings.disk_bytes, retention=settings.retention)
        wanted[Tier.DISK] = (lambda: DiskTier(disk, formats[Tier.DISK], limits, files), str(disk), files)
    if settings.shared_paths and settings.shared_bytes:
        wanted[Tier.SHARED] = (
            lambda: SharedDirectoryTier(
                settings.shared_paths, formats[Tier.SHARED], settings.shared_bytes, settings.retention, files
            ),
            settings.shared_paths[0],
            files,
        )
    return wanted


def memory_bytes(root: Path) -> int:
    """What a host's tier may take of a file system in memory, which others use too; containers often have a small one."""
    try:
        found = os.statvfs(root)
    except OSError:
        return 0
    return int(found.f_frsize * found.f_blocks * MEMORY_SHARE)


def probe_bytes_per_s(directory: str, files: Files) -> float:
    """How fast a file of `directory` is read that nobody has read lately."""
    probe = Path(directory) / f".probe-{os.getpid():x}-{time.monotonic_ns():x}"
    if "://" in directory:
        return UNKNOWN_BYTES_PER_S
    try:
        files.append(probe, [np.zeros(PROBE_BYTES, dtype=np.uint8)])
        files.sync(probe)
        files.forget_pages(probe)
        began_s = time.perf_counter()
        files.read(probe, 0, PROBE_BYTES)
        return PROBE_BYTES / (time.perf_counter() - began_s)
    except OSError as error:
        logger.warning("the speed of %s cannot be measured: %s", directory, error)
        return UNKNOWN_BYTES_PER_S
    finally:
        try:
            files.unlink(probe)
        except OSError as error:
            logger.warning("the probe %s cannot be removed: %s", probe, error)
