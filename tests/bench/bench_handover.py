"""KV from a prefill worker's cache into a decode worker's: what each transport makes of it, and what streaming leaves of it.

Two actors of a local Ray hold caches of the default model's shape. A hand-over is offer, ticket to the other process, and fetch
into its blocks. It is held against one memory copy of the same bytes in the same run, and a library's transport against what
the library moves by itself between the same memories. What streaming leaves to wait for is the last group of layers of the last
chunk: that hand-over is held against the one of the whole prompt in one piece. Replication is timed as the prefill that it runs
beside, while another process pulls from the one that computes as fast as the budget of `conductor demo migration` lets it.
"""

from __future__ import annotations

import importlib.util
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from conductor.demo import REPLICATION
from tests.bench.harness import Figure, Report, at_least, at_most
from workers.batching import READY_GROUPS, layer_groups
from workers.kv_transfer.base import KVDescriptor, KVTicket
from workers.kv_transfer.blocks import KVBlocks
from workers.kv_transfer.link_meter import LinkMeter
from workers.kv_transfer.registered import RegisteredTransport
from workers.kv_transfer.throttled import LinkLimit

KV = KVDescriptor("gqa", 1, "float32", (2, 3, 64), num_layers=30, block_tokens=64, layer_block_bytes=64 * 2 * 3 * 64 * 4)
BLOCKS = 32
CHUNK_BLOCKS = 8
CACHE_BLOCKS = 100
LEASE_S = 60.0
ROUNDS = 9
WARM_TRANSFERS = 12
MOST_MB = 200.0
SLOWED_GBPS = 4.0
COMPUTED_TOKENS, COMPUTED_ROUNDS = 1024, 6
LIBRARIES = {"nixl": "nixl_cu12", "mooncake": "mooncake"}


class Cache:
    """One worker's cache and transport, in an actor of its own."""

    def __init__(self, name: str, link_gbps: float | None = None) -> None:
        from workers.kv_transfer.select import make_transport

        self._rows = tuple(np.full((CACHE_BLOCKS, KV.layer_block_bytes), layer, np.uint8) for layer in range(KV.num_layers))
        self._transport = make_transport(name, KV, LinkLimit(link_gbps))
        self._transport.register(self._rows)
        self._stop = threading.Event()

    def hand_over(self, target: Any, ids: Sequence[int], groups: Sequence[range]) -> tuple[float, float]:
        """Offer group by group and have `target` fetch each at once, as workers do; seconds in all, and of the offers."""
        import ray

        began_s = time.perf_counter()
        tickets = []
        fetches = []
        for layers in groups:
            tickets.append(self._transport.offer(self._blocks(ids, layers), LEASE_S))
            fetches.append(target.fetch.remote(tickets[-1], ids, layers))
        offered_s = time.perf_counter() - began_s
        ray.get(fetches)
        whole_s = time.perf_counter() - began_s
        for ticket in tickets:
            self._transport.release(ticket.id)
        return whole_s, offered_s

    def offer(self, ids: Sequence[int], layers: range = range(KV.num_layers)) -> KVTicket:
        return self._transport.offer(self._blocks(ids, layers), LEASE_S)

    def fetch(self, ticket: KVTicket, ids: Sequence[int], layers: range) -> float:
        return timed(lambda: self._transport.fetch(ticket, self._blocks(ids, layers), LEASE_S))[1]

    def release(self, ticket_id: str) -> None:
        self._transport.release(ticket_id)

    def by_itself(self, ticket: KVTicket, ids: Sequence[int], layers: range) -> float:
        """The library's own read of the same memory: no contract, no checks."""
        transport, bytes_a_layer = self._transport, len(ids) * KV.layer_block_bytes
        assert isinstance(transport, RegisteredTransport)
        where = ticket.location
        offset = ids[0] * KV.layer_block_bytes
        local = [int(rows.ctypes.data) + offset for rows in self._rows]
        reads = [(ours, base + offset, bytes_a_layer) for ours, base in zip(local, where.bases, strict=True)]
        return timed(lambda: transport._read(where.peer, reads, time.monotonic() + LEASE_S))[1]

    def estimate_errors(self, source: Any, sizes: Sequence[int], together: int) -> list[float]:
        """Pull so many bytes, several at once, and hold each time against what the link's meter had foreseen."""
        meter, errors = LinkMeter(), []
        for number, nbytes in enumerate(sizes):
            blocks, layers = extent(nbytes)
            speed = meter.speed("peer", "bench")
            with ThreadPoolExecutor(together) as threads:
                pulls = [threads.submit(self._pull, source, meter, blocks, layers) for _ in range(together)]
                seconds = [pull.result() for pull in pulls]
            if speed is not None and number >= WARM_TRANSFERS:
                foreseen_s = speed.transfer_s(len(blocks) * len(layers) * KV.layer_block_bytes, together - 1)
                errors += [abs(foreseen_s / actual_s - 1) for actual_s in seconds]
        return errors

    def _pull(self, source: Any, meter: LinkMeter, blocks: Sequence[int], layers: range) -> float:
        import ray

        began_s = time.perf_counter()
        with meter.transfer() as moved:
            ticket = ray.get(source.offer.remote(blocks, layers))
            self._transport.fetch(ticket, self._blocks(blocks, layers), LEASE_S)
            moved.was("peer", "bench", ticket.nbytes)
        source.release.remote(ticket.id)
        return time.perf_counter() - began_s

    def copy_s(self) -> float:
        source = np.ones(BLOCKS * KV.block_bytes, np.uint8)
        target = np.zeros_like(source)
        return statistics.median(timed(lambda: np.copyto(target, source))[1] for _ in range(ROUNDS))

    def replicate(self, source: Any, bytes_per_s: float) -> int:
        """Pull chunk after chunk, not faster than that, until told to stop; how many came."""
        import ray

        self._stop.clear()
        ids, layers, pulled, began_s = range(CHUNK_BLOCKS), range(KV.num_layers), 0, time.perf_counter()
        while not self._stop.wait(
            max(0.0, began_s + pulled * CHUNK_BLOCKS * KV.block_bytes / bytes_per_s - time.perf_counter())
        ):
            ticket = ray.get(source.offer.remote(ids, layers))
            self._transport.fetch(ticket, self._blocks(ids, layers), LEASE_S)
            source.release.remote(ticket.id)
            pulled += 1
        return pulled

    def stop(self) -> None:
        self._stop.set()

    def prefill_s(self, seed: str) -> float:
        from tests.bench.bench_tiers import prefill

        return prefill(seed, lambda names: None, COMPUTED_TOKENS)[0]

    def _blocks(self, ids: Sequence[int], layers: range) -> KVBlocks:
        return KVBlocks(self._rows, tuple(ids)).layers(layers.start, layers.stop)


def extent(nbytes: int) -> tuple[range, range]:
    """Blocks and layers that come to about so many bytes."""
    if nbytes < KV.block_bytes:
        return range(1), range(max(1, nbytes // KV.layer_block_bytes))
    return range(nbytes // KV.block_bytes), range(KV.num_layers)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began_s = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began_s


class Pair:
    """A source and a target that have the same transport."""

    def __init__(self, ray: Any, name: str, link_gbps: float | None = None) -> None:
        self._ray, self._get = ray, ray.get
        actor = ray.remote(Cache).options(num_cpus=0, max_concurrency=4)
        self.source, self.target = (actor.remote(name, link_gbps) for _ in range(2))

    def estimate_error(self, most_mb: float, together: int = 1) -> float:
        """The median over sizes from 1 MB up, in random order."""
        draw = random.Random(0)
        sizes = [int(1e6 * most_mb ** draw.random()) for _ in range(WARM_TRANSFERS + 24)]
        return statistics.median(self._get(self.target.estimate_errors.remote(self.source, sizes, together)))

    def close(self) -> None:
        for actor in (self.source, self.target):
            self._ray.kill(actor)

    def hand_over(self, ids: Sequence[int], groups: Sequence[range]) -> tuple[float, float]:
        """Median seconds in all, and until all is offered."""
        call = self.source.hand_over.remote
        self._get(call(self.target, ids, groups))
        rounds = [self._get(call(self.target, ids, groups)) for _ in range(ROUNDS)]
        whole, offered = zip(*rounds, strict=True)
        return statistics.median(whole), statistics.median(offered)

    def replication_cost(self, bytes_per_s: float) -> tuple[float, int]:
        """Time of a prefill in the source that the target pulls from meanwhile, over one left alone, less 1; and the number
        of pulls. Both take turns, and each counts at its least disturbed."""
        plain, pulled, pulls = [], [], 0
        self._get(self.source.prefill_s.remote("warm"))
        for number in range(COMPUTED_ROUNDS):
            plain.append(self._get(self.source.prefill_s.remote(f"plain-{number}")))
            replicated = self.target.replicate.remote(self.source, bytes_per_s)
            pulled.append(self._get(self.source.prefill_s.remote(f"pulled-{number}")))
            self._get(self.target.stop.remote())
            pulls += self._get(replicated)
        return min(pulled) / min(plain) - 1, pulls

    def fetch(self, ids: Sequence[int], *, by_itself: bool) -> float:
        """Seconds of the target's read of everything."""
        ticket = self._get(self.source.offer.remote(ids))
        call = self.target.by_itself if by_itself else self.target.fetch
        seconds: float = self._get(call.remote(ticket, ids, range(KV.num_layers)))
        self._get(self.source.release.remote(ticket.id))
        return seconds

    def copy_s(self) -> float:
        seconds: float = self._get(self.target.copy_s.remote())
        return seconds


@contextmanager
def local_ray() -> Iterator[Any]:
    from conductor.config import ClusterSection
    from conductor.connection import actor_environment, connect

    connect(ClusterSection(object_store_mib=1024), 2, actor_environment(1))
    import ray

    try:
        yield ray
    finally:
        ray.shutdown()


def copy_figures(pair: Pair, name: str) -> list[Figure]:
    groups = layer_groups(KV.num_layers, BLOCKS * KV.layer_block_bytes, READY_GROUPS)
    scattered = np.random.default_rng(0).permutation(CACHE_BLOCKS)[:BLOCKS].tolist()
    chunk = list(range(CHUNK_BLOCKS))
    copy_s = statistics.median(pair.copy_s() for _ in range(3))
    least_hidden = 0.8 if name == "object_store" else 0.6  # of little, the calls to the other side are more
    whole_s, offered_s = pair.hand_over(range(BLOCKS), groups)
    note = f"{1e3 * whole_s:.1f} ms ({1e3 * offered_s:.1f} to offer) against {1e3 * copy_s:.1f} ms"
    apart_s, _ = pair.hand_over(scattered, groups)
    last_s, _ = pair.hand_over(chunk, layer_groups(KV.num_layers, CHUNK_BLOCKS * KV.layer_block_bytes)[-1:])
    return [
        at_most(f"{name}_over_copy", whole_s / copy_s, 2.5, "ratio", note),
        Figure(f"{name}_scattered_over_copy", apart_s / copy_s, "ratio", note="blocks in random places on both sides"),
        at_least(
            f"{name}_hidden_by_streaming", 1 - last_s / whole_s, least_hidden, "ratio", f"last group: {1e3 * last_s:.1f} ms"
        ),
    ]


def library_figures(pair: Pair, name: str) -> list[Figure]:
    ids = range(BLOCKS)
    nbytes = BLOCKS * KV.block_bytes
    pair.fetch(ids, by_itself=True)
    alone, ours = [], []
    for _ in range(ROUNDS):
        alone.append(pair.fetch(ids, by_itself=True))
        ours.append(pair.fetch(ids, by_itself=False))
    share = statistics.median(alone) / statistics.median(ours)
    speeds = [nbytes / statistics.median(seconds) / 1e9 for seconds in (ours, alone)]
    return [at_least(f"{name}_share_of_library", share, 0.8, "ratio", f"{speeds[0]:.2f} of {speeds[1]:.2f} GB/s")]


def estimate_figures(pair: Pair, name: str) -> list[Figure]:
    alone, two = pair.estimate_error(MOST_MB), pair.estimate_error(MOST_MB / 2, together=2)
    note = f"median of pulls of 1 to {MOST_MB:g} MB"
    return [
        at_most(f"{name}_estimate_error", alone, 0.2, "ratio", note),
        at_most(f"{name}_estimate_error_of_two", two, 0.2, "ratio", "two at once, half the size"),
    ]


def replication_figure(pair: Pair, name: str) -> Figure:
    budget = REPLICATION.budget_bytes_per_s
    cost, pulls = pair.replication_cost(budget)
    moved_mb = pulls * CHUNK_BLOCKS * KV.block_bytes / 1e6
    note = f"{moved_mb:.0f} MB, at most {budget / 1e6:.0f} MB/s, during {COMPUTED_ROUNDS} prefills of {COMPUTED_TOKENS} tokens"
    return at_most(f"{name}_replication_cost", cost, 0.03, "of a prefill", note)


def run() -> Report:
    figures: list[Figure] = []
    with local_ray() as ray:
        for name, module in {"object_store": "ray", "cma": "ctypes", **LIBRARIES}.items():
            if importlib.util.find_spec(module) is None:
                figures.append(Figure(f"{name}_share_of_library", None, "ratio", note=f"{module} is not installed"))
                continue
            pair = Pair(ray, name)
            figures += library_figures(pair, name) if name in LIBRARIES else copy_figures(pair, name)
            figures += estimate_figures(pair, name)
            if name not in LIBRARIES:
                figures.append(replication_figure(pair, name))
            pair.close()
        slowed = Pair(ray, "object_store", SLOWED_GBPS)
        figures += estimate_figures(slowed, f"object_store_at_{SLOWED_GBPS:g}_gbps")
    return Report("handover", figures, "python -m tests.bench handover")
