"""Whether this host has RDMA, so that no back end claims a path that it does not take.

Libraries that are asked for RDMA fall back to TCP without a word where there is no device. What they are asked for, and what is
reported as the protocol in use, is therefore decided from the devices that the kernel lists.
"""

from __future__ import annotations

from pathlib import Path

DEVICES = Path("/sys/class/infiniband")


def rdma_devices(directory: Path = DEVICES) -> tuple[str, ...]:
    """Names of devices with at least one active port (InfiniBand or RoCE)."""
    if not directory.is_dir():
        return ()
    return tuple(sorted(device.name for device in directory.iterdir() if any(map(_active, device.glob("ports/*/state")))))


def why_no_rdma(directory: Path = DEVICES) -> str | None:
    """The reason why RDMA is absent, None where it is there."""
    if rdma_devices(directory):
        return None
    listed = sorted(device.name for device in directory.iterdir()) if directory.is_dir() else []
    return f"no active port on {', '.join(listed)}" if listed else f"no device in {directory}"


def _active(state: Path) -> bool:
    return "ACTIVE" in state.read_text(encoding="ascii", errors="replace")
