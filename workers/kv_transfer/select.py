"""From a transport's name to the transport. Back ends are imported here, when they are chosen, and nowhere else."""

from __future__ import annotations

import logging
from collections.abc import Callable

from workers.kv_transfer.base import KVDescriptor, KVTransport, TransportUnavailable
from workers.kv_transfer.throttled import LinkLimit, ThrottledTransport

logger = logging.getLogger(__name__)


def _loopback(kv: KVDescriptor) -> KVTransport:
    from workers.kv_transfer.loopback import LoopbackTransport

    return LoopbackTransport(kv, fabric={})


def _object_store(kv: KVDescriptor) -> KVTransport:
    from workers.kv_transfer.object_store import ObjectStoreTransport, spans_hosts

    return ObjectStoreTransport(kv, checksums=spans_hosts())


def _object_store_as_found(kv: KVDescriptor) -> KVTransport:
    """Without touching its pages ahead of use, which takes memory of every process."""
    from workers.kv_transfer.object_store import ObjectStoreTransport, spans_hosts

    return ObjectStoreTransport(kv, checksums=spans_hosts(), touched_bytes=0)


def _cma(kv: KVDescriptor) -> KVTransport:
    from workers.kv_transfer.cma import CmaTransport

    return CmaTransport(kv)


def _rdt_nixl(kv: KVDescriptor) -> KVTransport:
    from workers.kv_transfer.rdt import DirectTransport

    return DirectTransport(kv)


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

    address: str = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"  # type: ignore[no-untyped-call]
    return address


TRANSPORTS: dict[str, Callable[[KVDescriptor], KVTransport]] = {
    "loopback": _loopback,
    "object_store": _object_store,
    "cma": _cma,
    "rdt_nixl": _rdt_nixl,
    "nixl": _nixl,
    "nixl_rdma": _nixl_rdma,
    "mooncake": _mooncake,
    "mooncake_rdma": _mooncake_rdma,
}

AMONG_OTHERS = TRANSPORTS | {"object_store": _object_store_as_found}

THROUGH_RAY = ("object_store", "rdt_nixl")
AUTOMATIC = "auto"
AUTOMATIC_ORDER = ("object_store", "cma", "nixl", "mooncake")


def transport_names(text: str) -> tuple[str, ...]:
    """What `transport` of a configuration names: one, several in order of preference, or `auto` for all that are here.

    Raises `ValueError`.
    """
    if text == AUTOMATIC:
        return AUTOMATIC_ORDER
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in TRANSPORTS]
    if unknown or len(set(names)) < len(names):
        allowed = f"{AUTOMATIC}, or one or several, each once, of {', '.join(sorted(TRANSPORTS))}"
        raise ValueError(f"transport is {text!r}; allowed: {allowed}")
    return names


def make_transports(text: str, kv: KVDescriptor, limit: LinkLimit | None = None) -> dict[str, KVTransport]:
    """The transports that `text` names, in its order. With `auto`, those that cannot work here are left out; one that is asked
    for by name and cannot work raises `TransportUnavailable`."""
    made: dict[str, KVTransport] = {}
    names = transport_names(text)
    known = TRANSPORTS if len(names) == 1 else AMONG_OTHERS
    for name in names:
        try:
            made[name] = _limited(known[name](kv), limit)
        except TransportUnavailable as error:
            if text != AUTOMATIC:
                raise
            logger.info("not used: %s", error)
    return made


def absent_transports(text: str, kv: KVDescriptor) -> dict[str, str]:
    """Of the transports that `text` names, those that cannot work on this machine, and why. What goes through Ray is not tried,
    for there may be none yet; it comes with Ray."""
    absent = {}
    for name in transport_names(text):
        if name in THROUGH_RAY:
            continue
        try:
            TRANSPORTS[name](kv).close()
        except TransportUnavailable as error:
            absent[name] = str(error)
    return absent


def make_transport(name: str, kv: KVDescriptor, limit: LinkLimit | None = None) -> KVTransport:
    """Raises `ValueError` for an unknown name and `TransportUnavailable` when the transport cannot work here."""
    if name not in TRANSPORTS:
        raise ValueError(f"transport is {name!r}; allowed: {', '.join(sorted(TRANSPORTS))}")
    return _limited(TRANSPORTS[name](kv), limit)


def _limited(transport: KVTransport, limit: LinkLimit | None) -> KVTransport:
    return transport if limit is None or not limit.limits else ThrottledTransport(transport, limit)
