"""KV read out of another process' memory on the same host by the kernel: cross-memory attach, as MPI and UCX call it.

The bytes are copied once, from the source's cache straight into the target's, by the process that wants them; the source does
nothing, and nothing needs to be mapped or set aside. Linux grants it to processes of one user, unless a security module keeps
even those apart; then the source says that its peers may (prctl). A process id means something only among processes that share
a kernel and its table of processes, so a ticket names both, and is refused elsewhere.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workers.kv_transfer.base import KVDescriptor, OfferGone, TransferTimeout, TransportUnavailable
from workers.kv_transfer.registered import Read, RegisteredTransport

MAX_READS = 1024  # of one call: the kernel's IOV_MAX
PIECE_BYTES = 16 << 20  # between two looks at the deadline
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


class Process(NamedTuple):
    """A process, and among which processes its id is known."""

    processes: str
    pid: int


class CmaTransport(RegisteredTransport):
    """Raises `TransportUnavailable` where the kernel has no such call."""

    name = "cma"
    protocol = "cross-memory attach (process_vm_readv)"

    def __init__(self, kv: KVDescriptor, clock: Callable[[], float] = time.time) -> None:
        super().__init__(kv, clock)
        self._libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._libc, "process_vm_readv"):
            raise TransportUnavailable("transport 'cma' needs Linux: the C library has no process_vm_readv")
        self._libc.process_vm_readv.restype = ctypes.c_ssize_t
        self._libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)  # fails where it is not needed
        self._self = Process(known_processes(), os.getpid())
        self._register_words()

    def _peer(self) -> Process:
        return self._self

    def _register(self, address: int, nbytes: int) -> None:
        """Memory is read as it is."""

    def _deregister(self, address: int, nbytes: int) -> None:
        """Nothing was done."""

    def _end(self) -> None:
        """There is no library."""

    def _read(self, peer: Process, reads: Sequence[Read], deadline_s: float) -> None:
        if peer.processes != self._self.processes:
            raise TransportUnavailable("transport 'cma' reaches no process of another host or container")
        for local, remote, nbytes in _calls(reads):
            if time.monotonic() > deadline_s:
                raise TransferTimeout(f"reading from process {peer.pid} did not end in time")
            vectors = (ctypes.c_void_p(local.ctypes.data), len(local), ctypes.c_void_p(remote.ctypes.data), len(remote))
            done = self._libc.process_vm_readv(peer.pid, *vectors, 0)
            if done != nbytes:
                raise _failure(peer.pid, ctypes.get_errno() if done < 0 else errno.EFAULT)


def known_processes() -> str:
    """The name of what gives a process id its meaning: this boot of the kernel, and the namespace of process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError as error:
        raise TransportUnavailable(f"transport 'cma' needs /proc: {error}") from error


def _calls(reads: Sequence[Read]) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """The reads as arguments of calls: vectors of (address, bytes) here and there, and the bytes of them all."""
    pieces = np.array(list(_pieces(reads)), dtype=np.uint64).reshape(-1, 3)
    group = np.cumsum(pieces[:, 2]) // PIECE_BYTES
    for one in np.unique(group):
        chosen = pieces[group == one]
        for start in range(0, len(chosen), MAX_READS):
            part = chosen[start : start + MAX_READS]
            yield np.ascontiguousarray(part[:, [0, 2]]), np.ascontiguousarray(part[:, [1, 2]]), int(part[:, 2].sum())


def _pieces(reads: Sequence[Read]) -> Iterator[Read]:
    for ours, theirs, nbytes in reads:
        for at in range(0, nbytes, PIECE_BYTES):
            yield ours + at, theirs + at, min(PIECE_BYTES, nbytes - at)


def _failure(pid: int, code: int) -> Exception:
    if code == errno.EPERM:
        return TransportUnavailable(f"transport 'cma' may not read from process {pid}: {os.strerror(code)}")
    return OfferGone(f"process {pid} cannot be read any more: {os.strerror(code)}")
