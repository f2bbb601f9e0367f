"""From a transport's name to the transport. Back ends are imported here, when they are chosen, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

from workers.kv_transfer.base import KVDescriptor, KVTransport
from workers.kv_transfer.throttled import LinkLimit, ThrottledTransport


def _loopback(kv: KVDescriptor) -> KVTransport:
    from workers.kv_transfer.loopback import LoopbackTransport

    return LoopbackTransport(kv, fabric={})


def _object_store(kv: KVDescriptor) -> KVTransport:
    from workers.kv_transfer.object_store import ObjectStoreTransport, spans_hosts

    return ObjectStoreTransport(kv, checksums=spans_hosts())


def _nixl(kv: KVDescriptor) -> KVTransport:
    from workers.kv_transfer.nixl import NixlTransport

    return NixlTransport(kv)


def _nixl_rdma(kv: KVDescriptor) -> KVTransport:
    from workers.kv_transfer.nixl import NixlRdmaTransport

    return NixlRdmaTransport(kv)


def _mooncake(kv: KVDescriptor) -> KVTransport:
    from workers.kv_transfer.mooncake import MooncakeTransport

    return MooncakeTransport(kv, _own_address())


def _mooncake_rdma(kv: KVDescriptor) -> KVTransport:
    from workers.kv_transfer.mooncake import MooncakeRdmaTransport

    return MooncakeRdmaTransport(kv, _own_address())


def _own_address() -> str:
    """The address that other hosts of the cluster know this one by."""
    import ray

    return ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"


TRANSPORTS: dict[str, Callable[[KVDescriptor], KVTransport]] = {
    "loopback": _loopback,
    "object_store": _object_store,
    "nixl": _nixl,
    "nixl_rdma": _nixl_rdma,
    "mooncake": _mooncake,
    "mooncake_rdma": _mooncake_rdma,
}


def make_transport(name: str, kv: KVDescriptor, limit: LinkLimit | None = None) -> KVTransport:
    """Raises `ValueError` for an unknown name and `TransportUnavailable` when the transport cannot work here."""
    if name not in TRANSPORTS:
        raise ValueError(f"transport is {name!r}; allowed: {', '.join(sorted(TRANSPORTS))}")
    transport = TRANSPORTS[name](kv)
    return transport if limit is None or not limit.limits else ThrottledTransport(transport, limit)
