"""The links over which hosts read the shared store: what is being read over each, and whose link reads for whom.

A prefill worker's own link may be busy while those of decode workers idle. Then a decode worker reads for it, and passes the
blocks on over the compute network (DualPath, arXiv 2602.21548):

    own read      (bytes left on the own link + bytes) / its bandwidth
    relayed read  R = (bytes left on the relay's link + bytes) / its bandwidth, P = bytes / what the network has left,
                  together (R + P) / G + (1 - 1/G) max(R, P), with G layer groups that follow each other

Nobody reads for a worker whose own link is idle. Of the decode workers the one whose link is free first is taken; of equal
ones the request's own, for then it holds the prefix and need not be sent it again. What is being read is known from placements
alone: it counts until the prefill begins, or until the time that it should have taken is over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from conductor.core.decode_pool import DecodePool
from conductor.core.links import Links
from conductor.core.prefill_pool import PrefillPool
from conductor.core.types import InvariantError, RequestId, Role, WorkerId, WorkerSpec
from conductor.core.worker_table import FloatArray, some


@dataclass(frozen=True, slots=True)
class Read:
    """What one request has read over the storage link of a host, and when that should be over."""

    host: str
    nbytes: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Relay:
    """A decode worker that reads for a prefill worker, and the reckoning that it was chosen by."""

    worker: WorkerId
    target: WorkerId
    own_read_s: float
    relayed_read_s: float
    own_left_bytes: float
    relay_left_bytes: float


class StorageLinks:
    """`relayed_reads` says for whom a decode worker may read, as in `SchedulerConfig`."""

    def __init__(self, prefill: PrefillPool, decode: DecodePool, links: Links, relayed_reads: str) -> None:
        self._prefill = prefill
        self._decode = decode
        self._links = links
        self._allowed = relayed_reads != "never"
        self._by_worker = relayed_reads == "other_worker"
        self._reads: dict[RequestId, Read] = {}
        self.due_s = math.inf  # when the next read should be over

    @property
    def busy(self) -> bool:
        """Whether anything is being read."""
        return bool(self._reads)

    def begin(self, request: RequestId, reader: WorkerId, nbytes: float, now: float) -> None:
        """A worker was told to read so many bytes for a request."""
        pool, decode = self._prefill, self._decode
        if reader in pool:
            host, speed = self._host(pool.specs[reader]), float(pool.shared_bytes_per_s[pool.row[reader]])
        else:
            host, speed = self._host(decode.specs[reader]), float(decode.storage_bytes_per_s[decode.row[reader]])
        begin_s = max([now, *(read.end_s for read in self._reads.values() if read.host == host)])
        self._reads[request] = Read(host, nbytes, begin_s + nbytes / speed)
        self._changed(host)

    def end(self, request: RequestId) -> None:
        """What the request had read is there, or not wanted any more."""
        read = self._reads.pop(request, None)
        if read is not None:
            self._changed(read.host)

    def expire(self, now: float) -> None:
        """Reads that should be over are over; there are such from `due_s` on."""
        for request in [request for request, read in self._reads.items() if read.end_s <= now]:
            self.end(request)

    def joined(self, spec: WorkerSpec) -> None:
        """A worker came to a host whose link may be busy already."""
        self._changed(self._host(spec))

    def was_read(self, worker: WorkerId, bytes_per_s: float) -> None:
        """What a decode worker's reads have come to."""
        decode = self._decode
        if worker in decode and decode.specs[worker].role is Role.DECODE:
            decode.storage_bytes_per_s[decode.row[worker]] = bytes_per_s
            self._changed(self._host(decode.specs[worker]))

    def read_s(self, nbytes: FloatArray) -> FloatArray:
        """Time to read so many bytes into each prefill worker, over its own link or another's, whichever is sooner."""
        own_s = self._own_s(nbytes)
        relayed_s = self._relayed_s(nbytes) if self._allowed and self._reads else None
        return own_s if relayed_s is None else np.minimum(own_s, relayed_s)

    def relay(self, row: int, nbytes: float, blocks: int, decode_worker: WorkerId) -> Relay | None:
        """Who reads for the prefill worker in `row`; None where it had better read itself. The request's own decode worker has
        room for the prefix, others must have it to spare."""
        pool, decode = self._prefill, self._decode
        left_bytes = float(pool.storage_left_bytes[row])
        if not self._allowed or left_bytes == 0.0:
            return None
        wait_s = self._wait_s()
        room = decode.capacity_blocks - decode.reserved_blocks >= blocks
        host = self._host(pool.specs[pool.ids[row]])
        relays = [
            (float(wait_s[number]), worker != decode_worker, number)
            for number, worker in enumerate(decode.ids)
            if wait_s[number] < math.inf
            and (room[number] or worker == decode_worker)
            and self._host(decode.specs[worker]) != host
        ]
        if not relays:
            return None
        _, _, best = min(relays)
        every = np.full(len(pool), nbytes)
        own_s, relayed_s = float(self._own_s(every)[row]), float(self._over_s(best, every)[row])
        if relayed_s >= own_s:
            return None
        relay_left_bytes = self._left_bytes(self._host(decode.specs[decode.ids[best]]))
        return Relay(decode.ids[best], pool.ids[row], own_s, relayed_s, left_bytes, relay_left_bytes)

    def _own_s(self, nbytes: FloatArray) -> FloatArray:
        pool = self._prefill
        seconds: FloatArray = (pool.storage_left_bytes + nbytes) / pool.shared_bytes_per_s
        seconds += pool.latency_s
        return seconds

    def _relayed_s(self, nbytes: FloatArray) -> FloatArray | None:
        """The time over the decode worker whose link is free first, on another host. None where there is no such worker."""
        pool, decode, wait_s = self._prefill, self._decode, self._wait_s()
        if not some(wait_s < math.inf):
            return None
        first = int(wait_s.argmin())
        seconds = self._over_s(first, nbytes)
        hosts = [self._host(decode.specs[worker]) for worker in decode.ids]
        beside = np.array([self._host(pool.specs[worker]) == hosts[first] for worker in pool.ids], dtype=np.bool_)
        if some(beside):
            wait_s[[host == hosts[first] for host in hosts]] = math.inf
            second = int(wait_s.argmin())
            seconds[beside] = self._over_s(second, nbytes)[beside] if wait_s[second] < math.inf else math.inf
        seconds[pool.storage_left_bytes == 0.0] = math.inf
        return seconds

    def _over_s(self, relay: int, nbytes: FloatArray) -> FloatArray:
        """The time over the decode worker in row `relay`, to each prefill worker."""
        pool, decode = self._prefill, self._decode
        links = self._links.outbound(decode.ids[relay])
        link_bytes_per_s = pool.link_bytes_per_s if links is None else links.bytes_per_s
        network: FloatArray = np.minimum(pool.nic_bytes_per_s / (pool.flows_in - pool.flows_stored + 1.0), link_bytes_per_s)
        np.minimum(network, decode.nic_bytes_per_s[relay] / (decode.flows_out[relay] + 1.0), out=network)
        read_s: FloatArray = nbytes / decode.storage_bytes_per_s[relay] + decode.storage_wait_s[relay]
        pass_s: FloatArray = nbytes / network
        seconds = (read_s + pass_s) / pool.layer_groups
        seconds += pool.overlap_share * np.maximum(read_s, pass_s)
        seconds += pool.latency_s if links is None else links.latency_s
        return seconds

    def _wait_s(self) -> FloatArray:
        """How long each decode worker's link is still busy; infinite where it reads for nobody."""
        return np.where(self._decode.accepts, self._decode.storage_wait_s, math.inf)

    def _host(self, spec: WorkerSpec) -> str:
        """Whose link a worker reads over."""
        return spec.id if self._by_worker else spec.node

    def _left_bytes(self, host: str) -> float:
        return sum(read.nbytes for read in self._reads.values() if read.host == host)

    def _changed(self, host: str) -> None:
        """Bring the columns of a host's workers up to date."""
        pool, decode, left_bytes = self._prefill, self._decode, self._left_bytes(host)
        self.due_s = min((read.end_s for read in self._reads.values()), default=math.inf)
        for worker in pool.ids:
            if self._host(pool.specs[worker]) == host:
                pool.storage_left_bytes[pool.row[worker]] = left_bytes
        for worker in decode.ids:
            if self._host(decode.specs[worker]) == host:
                row = decode.row[worker]
                speed = float(decode.storage_bytes_per_s[row])
                decode.storage_wait_s[row] = left_bytes / speed if speed > 0.0 else math.inf
        pool.links_changed()

    def check(self) -> None:
        left = [self._left_bytes(self._host(self._prefill.specs[worker])) for worker in self._prefill.ids]
        if left != self._prefill.storage_left_bytes.tolist():
            raise InvariantError(f"{self._prefill.storage_left_bytes} bytes are left on storage links, {left} are being read")
