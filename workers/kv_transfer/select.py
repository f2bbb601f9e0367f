"""From a transport's name to the transport. Back ends are imported here, when they are chosen, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

from workers.kv_transfer.base import KVDescriptor, KVTransport
from workers.kv_transfer.throttled import LinkLimit, ThrottledTransport


def _loopback(kv: KVDescriptor) -> KVTransport:
    from workers.kv_transfer.loopback import LoopbackTransport

    return LoopbackTransport(kv, fabric={})


def _object_store(kv: KVDescriptor) -> KVTransport:
    from workers.kv_transfer.object_store import ObjectStoreTransport

    return ObjectStoreTransport(kv)


TRANSPORTS: dict[str, Callable[[KVDescriptor], KVTransport]] = {"loopback": _loopback, "object_store": _object_store}


def make_transport(name: str, kv: KVDescriptor, limit: LinkLimit | None = None) -> KVTransport:
    """Raises `ValueError` for an unknown name and `TransportUnavailable` when the transport cannot work here."""
    if name not in TRANSPORTS:
        raise ValueError(f"transport is {name!r}; allowed: {', '.join(sorted(TRANSPORTS))}")
    transport = TRANSPORTS[name](kv)
    return transport if limit is None or not limit.limits else ThrottledTransport(transport, limit)
