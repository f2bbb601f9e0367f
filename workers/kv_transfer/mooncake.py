"""KV through the Mooncake transfer engine: batched one-sided reads of registered memory, over RDMA or TCP.

Engines find each other by address, without a metadata server. Asked for RDMA where there is none, the library would use TCP
and not say so; here it is asked for what the host has, and `protocol` says which. A read waits in the library with its own
timeout, and returns only when nothing is written any more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from workers.kv_transfer.base import KVDescriptor, OfferGone, TransferError, TransferTimeout, TransportUnavailable
from workers.kv_transfer.rdma import rdma_devices, why_no_rdma
from workers.kv_transfer.registered import Read, RegisteredTransport

PACKAGES = "libibverbs1 librdmacm1 ibverbs-providers libnuma1"
NO_METADATA_SERVER = "P2PHANDSHAKE"


class MooncakeTransport(RegisteredTransport):
    """`host` is the address at which peers reach this process. Raises `TransportUnavailable` where no engine starts."""

    name = "mooncake"

    def __init__(self, kv: KVDescriptor, host: str = "127.0.0.1", clock: Callable[[], float] = time.time) -> None:
        super().__init__(kv, clock)
        self._devices = rdma_devices()
        self._engine: Any = _start_engine(host, self._devices)
        self._address = f"{host}:{self._engine.get_rpc_port()}"
        self._register_words()

    @property
    def protocol(self) -> str:
        if self._devices:
            return f"Mooncake over RDMA ({', '.join(self._devices)})"
        return f"Mooncake over TCP (no RDMA: {why_no_rdma()})"

    def _peer(self) -> str:
        return self._address

    def _register(self, address: int, nbytes: int) -> None:
        if self._engine.register_memory(address, nbytes):
            raise TransferError(f"Mooncake did not register {nbytes} B of memory")

    def _deregister(self, address: int, nbytes: int) -> None:
        self._engine.unregister_memory(address)

    def _end(self) -> None:
        self._engine = None  # its threads end with its last reference

    def _read(self, peer: str, reads: Sequence[Read], deadline_s: float) -> None:
        ours, theirs, lengths = (list(column) for column in zip(*reads, strict=True))
        engine = self._engine
        if engine is None:
            raise TransportUnavailable("transport 'mooncake' is closed")
        failed = engine.batch_transfer_sync_read(peer, ours, theirs, lengths)
        if failed:
            raise OfferGone(f"the source at {peer} cannot be read any more: Mooncake returned {failed}")
        if time.monotonic() > deadline_s:
            raise TransferTimeout(f"a Mooncake read from {peer} did not end in time")


class MooncakeRdmaTransport(MooncakeTransport):
    """The same, where nothing slower than RDMA will do."""

    name = "mooncake_rdma"

    def __init__(self, kv: KVDescriptor, host: str = "127.0.0.1", clock: Callable[[], float] = time.time) -> None:
        absent = why_no_rdma()
        if absent is not None:
            raise TransportUnavailable(f"transport 'mooncake_rdma' needs RDMA: {absent}")
        super().__init__(kv, host, clock)


def _start_engine(host: str, devices: Sequence[str]) -> Any:
    os.environ.setdefault("GLOG_minloglevel", "1")  # it tells of every connection
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        needs = f"the extra kv-conductor[rdma] and the Debian packages {PACKAGES}"
        raise TransportUnavailable(f"transport 'mooncake' needs {needs}: {error}") from error
    engine = TransferEngine()
    failed = engine.initialize(host, NO_METADATA_SERVER, "rdma" if devices else "tcp", ",".join(devices))
    if failed:
        raise TransportUnavailable(f"transport 'mooncake': the engine did not start on {host} (it returned {failed})")
    return engine
