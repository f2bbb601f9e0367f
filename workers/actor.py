"""What every worker actor does: describe itself, report, offer and pull blocks, and stream outputs.

A thin shell. Calls arrive on the event loop and are answered at once; kernels run in one compute thread, KV moves in a few
transfer threads, so a pull is served while a prompt computes. A plain class: the composition root makes it a Ray actor, tests
use it as it is. Peers and the Conductor are handles whose `handle.method.remote(...)` can be awaited. The methods and their
meaning are the "Actor protocol" of `conductor/DESIGN.md`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from conductor.core.events import Event, RequestFailed, TransferFailed, TransferFinished
from conductor.core.messages import GenerationJob, TokenOutput
from conductor.core.types import BlockHash, FinishReason, RequestId, Tier, WorkerId, WorkerLoad, WorkerSpec
from workers.assembly import Build, build_parts, node_of, warm_up
from workers.block_rows import Restored, pool_rows, restore
from workers.cache_commands import carry_out
from workers.config import WorkerConfig
from workers.exchange import Offer, fetch_prefix, hold_prefix, publish_prefix
from workers.jobs import JobKey, job_key, last_output
from workers.kv_store.base import KVStoreError
from workers.kv_store.hierarchy import Hierarchy
from workers.kv_transfer.base import KVTicket, TransferError
from workers.kv_transfer.paired import PairedTransports
from workers.output_channels import OutputChannels
from workers.pairs import Pairs
from workers.reporter import Reporter

logger = logging.getLogger(__name__)

T = TypeVar("T")
TRANSFER_THREADS = 4
MAX_REMEMBERED_ENDS = 10_000


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought: `blocks` that were not here before."""

    blocks: int = 0
    nbytes: int = 0
    duration_s: float = 0.0


class WorkerActor(ABC):
    """Base of both kinds of workers. `build` makes the parts; it and the warm-up run in the constructor."""

    def __init__(self, config: WorkerConfig, build: Build = build_parts) -> None:
        self.config = config
        self._parts = build(config)
        self.engine = self._parts.engine
        self.cache = self.engine.cache
        self.transport = PairedTransports(self.cache.kv, self._parts.transports)
        self.transport.register(self.cache.rows)
        self.exchange = self._parts.exchange(self.cache, self.transport, config.lease_s)
        warm_up(self.engine)
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._transfer = ThreadPoolExecutor(TRANSFER_THREADS, thread_name_prefix="kv-transfer")
        self._channels = OutputChannels(config.max_unread_outputs)
        self.store = Hierarchy(self._parts.tiers, partial(pool_rows, self.cache), config.store.queue_blocks)
        self._reporter = Reporter(config.worker_id, self.cache, self.store, self._load, config.report_interval_s)
        self._offers: dict[str, tuple[Offer, list[int]]] = {}
        self._ended: OrderedDict[JobKey, bool] = OrderedDict()  # whether it ended in the ordinary way
        self._tasks: set[asyncio.Task[Any]] = set()
        self._wake = asyncio.Event()
        self._pairs = Pairs(self.id, self.transport, self._move, self._spawn)
        self._started = False
        self._in_loop: Callable[..., Any]  # has the event loop make a call, from any thread

    @property
    def id(self) -> WorkerId:
        return self.config.worker_id

    # --- the Conductor's side -----------------------------------------------------------------------------------------

    async def describe(self) -> WorkerSpec:
        """What this worker is; the answer means that it can take work."""
        return WorkerSpec(
            id=self.id,
            role=self.config.role,
            node=node_of(self.config),
            profile=self._parts.profile,
            capacity_blocks={Tier.DEVICE: self.cache.num_blocks, **self.store.capacities()},
            model=self._parts.model_name,
            rack=self.config.rack,
            zone=self.config.zone,
            max_batch=self.config.max_batch,
        )

    async def attach(self, conductor: Any, epoch: int) -> None:
        """Report to `conductor` from now on, first a snapshot."""
        self._start()
        self._reporter.attach(conductor, epoch)
        self._pairs.tell_again()

    async def snapshot(self) -> None:
        self._reporter.ask_snapshot()

    async def drop_blocks(self, blocks: Sequence[BlockHash]) -> None:
        """Make these the first to be evicted."""
        self.cache.demote(blocks)

    async def alive(self) -> None:
        """Never returns: its failure is the news that this process is gone."""
        await asyncio.Event().wait()

    @abstractmethod
    async def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Stop within one chunk or step and release everything. Unknown requests are remembered and refused later."""

    async def stats(self) -> dict[str, Any]:
        """Plain numbers for metrics and tests."""
        return {
            "worker": self.id,
            "num_blocks": self.cache.num_blocks,
            "free_blocks": self.cache.available - self.cache.idle,
            "cached_idle_blocks": self.cache.idle,
            "pinned_blocks": self.cache.pinned,
            "offers": self.transport.offered,
            "protocols": self.transport.protocols,
            "transport_of_peer": self.transport.chosen(),
            "transport_fallbacks": self.transport.fallbacks,
            "unread_outputs": self._channels.unread,
            "attached": self._reporter.attached,
            "pid": os.getpid(),
            "tiers": [asdict(report) for report in await asyncio.to_thread(self.store.reports)],
        }

    async def cache_command(self, action: str, name: BlockHash | None) -> dict[str, Any]:
        """What an operator asks of this worker's tiers: `stats`, or an action of `cache_commands.py`."""
        if action == "stats":
            reports = await asyncio.to_thread(self.store.reports)
            return {report.tier.name.lower(): asdict(report) for report in reports}
        done = await asyncio.to_thread(carry_out, tuple(self.store.tiers.values()), action, name)
        self._reporter.touch()
        return done

    async def outputs(self, channel: str) -> AsyncIterator[list[TokenOutput]]:
        """Outputs for one gateway as they come. A second consumer of a channel takes over."""
        self._start()
        async for batch in self._channels.stream(channel):
            yield batch

    # --- blocks between workers ---------------------------------------------------------------------------------------

    async def offer_blocks(
        self, blocks: Sequence[BlockHash], first: int = 0, peer: WorkerId | None = None, cuts: Sequence[int] = ()
    ) -> Offer | None:
        """Pin the longest prefix of `blocks`, which begin at a root, that serves `peer`, and publish what it needs of it for
        whatever begins with it, all but its first `first` blocks.

        None when there is no more than `first`. No ticket goes beyond one of the layers `cuts`, where another place of the
        peer's begins; such a peer keeps blocks in all layers or not at all. The offer ends with `release_offer` or its lease.
        """
        self._start()
        await self._restore_any(blocks)
        held = hold_prefix(self.cache, blocks, first, cuts, self.engine.replayed_blocks)
        if held is None:
            return None
        ids = held.ids
        try:
            parts = await self._move(publish_prefix, self.exchange, self.cache, held, first, peer, cuts)
        except BaseException:
            self.cache.release(ids)
            raise
        offer = Offer(tuple(blocks[: len(ids)]), first, held.bare, parts, self.id)
        self._offers[offer.id] = offer, ids
        return offer

    async def release_offer(self, offer_id: str) -> None:
        self.exchange.release(offer_id)
        offer, ids = self._offers.pop(offer_id, (None, []))
        if offer is not None:
            for part in offer.parts[1:]:
                self.exchange.release(part.ticket.id)
            self.cache.release(ids)

    async def pull_blocks(self, transfer_id: str, source: Any, blocks: Sequence[BlockHash]) -> None:
        """Copy `blocks`, which begin at a root, from `source` and keep them; reports how that ended."""
        self._start()
        try:
            pulled = await self._pull(source, blocks)
        except Exception as error:
            self._report(TransferFailed(transfer_id, failure_text(error)))
        else:
            self._report(TransferFinished(transfer_id, pulled.nbytes, pulled.duration_s))

    async def _pull(self, source: Any, blocks: Sequence[BlockHash]) -> Pulled:
        """Fetch what is missing of a prefix and keep it. On any failure nothing has changed here."""
        held = self.cache.match(blocks)
        if held == len(blocks):
            return Pulled()
        began_s = time.perf_counter()
        async with asyncio.timeout(self.config.lease_s):
            offer = await self._take_offer(source, blocks, held)
            while offer is None:  # over a transport that failed; the source has another
                offer = await self._take_offer(source, blocks, held)
        self._reporter.touch()
        self._pairs.fetching_from(offer.worker, source)
        return Pulled(len(offer.blocks) - offer.first, offer.nbytes, time.perf_counter() - began_s)

    async def _take_offer(self, source: Any, blocks: Sequence[BlockHash], held: int) -> Offer | None:
        """Have the missing blocks offered, and keep them. None when the transport failed and the source has another."""
        with self.transport.meter.transfer() as moved:
            offer: Offer | None = await source.offer_blocks.remote(tuple(blocks), held, self.id, self.exchange.cuts)
            if offer is None:
                raise TransferError(f"the source holds none of the {len(blocks) - held} missing blocks")
            try:
                full = await self._move(fetch_prefix, self.exchange, self.cache, offer)
            except TransferError as error:
                if await source.shun_transport.remote(self.id, offer.transport, failure_text(error)):
                    return None
                raise
            finally:
                self._spawn(quietly(source.release_offer.remote(offer.id)))
            if full is not None:
                raise TransferError(f"{full.needed} blocks are needed for a pull, {full.available} can be had")
            moved.was(offer.worker, offer.transport, offer.nbytes)
        self._report_link(offer.worker)
        return offer

    async def _restore(self, tier: Tier, blocks: Sequence[BlockHash]) -> Restored:
        """Bring a prefix up from a tier of this worker into its device pool, as far as it is there."""
        kept = self.store.tiers.get(tier)
        if kept is None:
            raise KVStoreError(f"this worker has no {tier.name.lower()} tier")
        restored = await self._move(restore, self.cache, kept, tuple(blocks))
        self.store.was_read(tier, restored.nbytes, restored.duration_s)
        self._reporter.touch()
        return restored

    async def _restore_any(self, blocks: Sequence[BlockHash]) -> None:
        """Bring up what a peer asks for and only a lower tier of this worker holds."""
        for tier in self.store.tiers:
            if self.cache.match(blocks) < len(blocks):
                await self._restore(tier, blocks)

    async def offer_probes(self) -> list[KVTicket]:
        """A small offer over each transport, for a peer to rank them by."""
        tickets: list[KVTicket] = await self._move(self.transport.offer_probes)
        return tickets

    async def rank_transports(self, peer: WorkerId, tickets: Sequence[KVTicket]) -> tuple[str, ...]:
        """The transports by which a peer's probes came here, fastest first."""
        ranked: tuple[str, ...] = await self._move(self.transport.rank_probes, peer, tickets)
        return ranked

    async def use_transports(self, peer: WorkerId, ranked: Sequence[str]) -> None:
        self.transport.use(peer, ranked)

    async def shun_transport(self, peer: WorkerId, name: str, reason: str) -> bool:
        """A transport has failed `peer`; tells whether another one takes its place."""
        return self.transport.shun(peer, name, reason)

    # --- for the two kinds --------------------------------------------------------------------------------------------

    @abstractmethod
    def _load(self) -> WorkerLoad: ...

    @abstractmethod
    async def _work(self) -> None:
        """The loop that computes; runs until cancelled."""

    def _on_blocks_freed(self) -> None:
        self._wake.set()

    def _reap(self) -> None:
        """End what has outlived its lease."""
        for offer_id in self.exchange.expire():
            if offer_id in self._offers:
                logger.warning("offer %s outlived its lease of %g s", offer_id, self.config.lease_s)
                self._spawn(self.release_offer(offer_id))

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        loop = asyncio.get_running_loop()
        self._in_loop = loop.call_soon_threadsafe
        self.cache.on_freed = lambda: self._in_loop(self._on_blocks_freed)
        self._spawn(self._reporter.run())
        self._spawn(self._keep_reaping())
        self._spawn(self._keep_telling_of_tiers())
        self._spawn(self._work())

    async def close(self) -> None:
        """End tasks and threads; offers end with them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.cache.on_freed = lambda: None
        self._compute.shutdown()
        self._transfer.shutdown()
        await asyncio.to_thread(self.exchange.close)
        await asyncio.to_thread(self.store.close)

    async def _keep_reaping(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.config.lease_s / 4))
            self._reap()

    async def _keep_telling_of_tiers(self) -> None:
        settings, looked_s = self.config.store, time.monotonic()
        while True:
            self._reporter.tell_tiers(await asyncio.to_thread(self.store.reports))
            if time.monotonic() - looked_s >= settings.look_interval_s:
                looked_s = time.monotonic()
                self._reporter.ask_look()
            await asyncio.sleep(settings.report_interval_s)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        """In the compute thread."""
        return await asyncio.get_running_loop().run_in_executor(self._compute, function, *args)

    async def _move(self, function: Callable[..., T], *args: Any) -> T:
        """In a transfer thread."""
        return await asyncio.get_running_loop().run_in_executor(self._transfer, function, *args)

    def _report_link(self, peer: WorkerId) -> None:
        """Tell what the link from a peer is worth, when that has changed."""
        news = self._pairs.link_news(peer, self._reporter.epoch) if self._reporter.attached else None
        if news is not None:
            self._report(news)

    def _report(self, *events: Event) -> None:
        self._reporter.add(*events)

    def _emit(self, job: GenerationJob, output: TokenOutput) -> bool:
        return self._channels.put(job.channel, output)

    def _end(self, key: JobKey, *, done: bool = False) -> None:
        """Never take this attempt again. `done`: it was taken here and went its way, so a repeated call is harmless."""
        self._ended[key] = done or self._ended.get(key, False)
        if len(self._ended) > MAX_REMEMBERED_ENDS:
            self._ended.popitem(last=False)

    def _fail(self, job: GenerationJob, message: str, blamed: WorkerId | None = None) -> None:
        """Report that the request cannot go on here."""
        logger.warning("request %s (attempt %d) failed: %s", job.request.id, job.request.attempt, message)
        self._end(job_key(job))
        self._report(RequestFailed(job.request.id, job.request.attempt, blamed or self.id, message))
        self._emit(job, last_output(job, self.id, job.request.emitted_tokens, FinishReason.FAILED, message))


def failure_text(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def quietly(call: Any) -> None:
    try:
        await call
    except Exception as error:
        logger.info("a call to a peer failed: %s", failure_text(error))
