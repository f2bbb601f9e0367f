"""KV through NIXL: one-sided reads over UCX, which takes RDMA where there is any, else shared memory or TCP.

An agent is a process' end of it, and a ticket carries the agent's metadata, by which a target connects at its first fetch. The
agent is used by one call at a time; a read in flight is polled, so that several fly at once. A thread of the library serves
peers; it sleeps until UCX wakes it, for as long as an agent that nobody talks to can afford.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

from workers.kv_transfer.base import (
    KVDescriptor,
    OfferGone,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
)
from workers.kv_transfer.rdma import rdma_devices, why_no_rdma
from workers.kv_transfer.registered import Read, RegisteredTransport

logger = logging.getLogger(__name__)

POLL_S = 0.0002
ABORT_RETRY_S = 0.1
IDLE_SLEEP_US = 10_000
IN_FLIGHT, DONE = "PROC", "DONE"
BUILDS = ("nixl_cu12", "nixl_cu13")  # the library comes by CUDA version; neither needs CUDA for host memory
Peer: TypeAlias = tuple[str, bytes]


class NixlTransport(RegisteredTransport):
    """Raises `TransportUnavailable` where NIXL is not installed or has no UCX."""

    name = "nixl"

    def __init__(self, kv: KVDescriptor, clock: Callable[[], float] = time.time) -> None:
        super().__init__(kv, clock)
        self._id = uuid.uuid4().hex
        self._agent: Any = start_agent(self._id)
        self._agent_lock = threading.Lock()
        self._handles: dict[int, Any] = {}
        self._connected: dict[str, bytes] = {}
        self._metadata = b""
        self._register_words()

    @property
    def protocol(self) -> str:
        absent = why_no_rdma()
        if absent is None:
            return f"NIXL, UCX over RDMA ({', '.join(rdma_devices())})"
        return f"NIXL, UCX over shared memory or TCP (no RDMA: {absent})"

    def _peer(self) -> Peer:
        return self._id, self._metadata

    def _register(self, address: int, nbytes: int) -> None:
        with self._agent_lock:
            self._handles[address] = self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")
            self._metadata = self._agent.get_agent_metadata()

    def _deregister(self, address: int, nbytes: int) -> None:
        with self._agent_lock:
            self._agent.deregister_memory(self._handles.pop(address))

    def _end(self) -> None:
        with self._agent_lock:
            self._agent = None  # its threads end with its last reference

    def _read(self, peer: Peer, reads: Sequence[Read], deadline_s: float) -> None:
        try:
            self._wait(self._begin(peer, reads), deadline_s)
        except TransferError:
            raise
        except Exception as error:  # the library's own tree of errors has no common root
            raise OfferGone(f"the source cannot be read any more: {type(error).__name__}: {error}") from error

    def _begin(self, peer: Peer, reads: Sequence[Read]) -> Any:
        with self._agent_lock:
            self._connect(*peer)
            local = self._agent.get_xfer_descs([(ours, nbytes, 0) for ours, _, nbytes in reads], "DRAM")
            remote = self._agent.get_xfer_descs([(theirs, nbytes, 0) for _, theirs, nbytes in reads], "DRAM")
            handle = self._agent.initialize_xfer("READ", local, remote, peer[0])
            self._agent.transfer(handle)
            return handle

    def _connect(self, peer_id: str, metadata: bytes) -> None:
        """Take in what the peer has registered, unless it is known."""
        if self._connected.get(peer_id) != metadata:
            self._agent.add_remote_agent(metadata)
            self._connected[peer_id] = metadata

    def _wait(self, handle: Any, deadline_s: float) -> None:
        """Until the read has ended, one way or another: after a timeout, too, nothing may be written any more."""
        state = self._poll(handle, deadline_s)
        late = state == IN_FLIGHT
        while state == IN_FLIGHT and not self._released(handle):
            state = self._poll(handle, time.monotonic() + ABORT_RETRY_S)
        if late:
            raise TransferTimeout("a NIXL read did not end in time")
        self._released(handle)
        if state != DONE:
            raise OfferGone(f"a NIXL read ended as {state}")

    def _poll(self, handle: Any, deadline_s: float) -> str:
        """The state that the read has ended in, or that it is in flight after the deadline."""
        while True:
            with self._agent_lock:
                state: str = self._agent.check_xfer_state(handle)
            if state != IN_FLIGHT or time.monotonic() >= deadline_s:
                return state
            time.sleep(POLL_S)

    def _released(self, handle: Any) -> bool:
        """End a read; one in flight is given up if the library lets go of it."""
        with self._agent_lock:
            try:
                self._agent.release_xfer_handle(handle)
            except Exception as error:  # the library's own tree of errors has no common root
                logger.warning("NIXL does not let go of a read: %s", error)
                return False
        return True


class NixlRdmaTransport(NixlTransport):
    """The same, where nothing slower than RDMA will do."""

    name = "nixl_rdma"

    def __init__(self, kv: KVDescriptor, clock: Callable[[], float] = time.time) -> None:
        absent = why_no_rdma()
        if absent is not None:
            raise TransportUnavailable(f"transport 'nixl_rdma' needs RDMA: {absent}")
        super().__init__(kv, clock)


def start_agent(agent_id: str) -> Any:
    build = next((build for build in BUILDS if importlib.util.find_spec(build) is not None), None)
    if build is None:
        raise TransportUnavailable(
            f"transport 'nixl' needs the extra kv-conductor[rdma]: none of {', '.join(BUILDS)} is installed"
        )
    nixl, bindings = (importlib.import_module(f"{build}.{module}") for module in ("_api", "_bindings"))
    agent = nixl.nixl_agent(agent_id, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.agent = bindings.nixlAgent(agent_id, _agent_config(bindings))
    if "UCX" not in agent.get_plugin_list():
        raise TransportUnavailable(f"transport 'nixl' needs the UCX back end; there are {sorted(agent.get_plugin_list())}")
    agent.create_backend("UCX")
    _end_without_finalisers()
    return agent


@cache
def _end_without_finalisers() -> None:
    """Have this process, when it ends, leave with its own status before shared libraries are finalised: the library's copy of
    libnl then crashes, in any process that has had an agent. Python has cleaned up by that time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)


def _agent_config(bindings: Any) -> Any:
    """What the library's own wrapper sets, but for the sleep: there it is 0, and an idle agent takes up to a whole core."""
    config = bindings.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = IDLE_SLEEP_US
    config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
    return config
