"""A prefill worker whose layers are shared out over a pipeline of stages, as its first stage sees it.

Chunks of a prompt flow through the stages: while one computes a chunk, the stage before it computes the next (chunked pipeline
parallelism, Mooncake FAST'25, section 5.1). To everybody else they are one worker. Two things make it so: `StagedModel`, a
model whose later layers are elsewhere, and `StagedExchange`, blocks whose later layers are. Block ids, names, reports and
the request itself stay with the first stage.

A chunk whose logits nobody asks for is passed on and not waited for. All stages take chunks in the order in which the first one
computes them, so a block may be named, reused, given back and handed out anew before later stages have got to it: they do
the same in the same order. Only what comes from outside of the flow, KV of other workers, waits for all that is in it.

KV goes from each stage straight to the worker that needs it. A stage that is lost, or that failed to compute, takes the whole
worker with it: what its blocks hold is not known any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from models.base import CausalLM, ForwardBatch, PagedKVCache
from models.llama import Llama
from workers.block_pool import BlockId
from workers.device_cache import DeviceCache
from workers.exchange import LocalExchange
from workers.kv_transfer.base import KVTicket
from workers.kv_transfer.paired import PairedTransports

CHUNKS_PER_STAGE = 2  # one that it computes, one that waits for it


class StageHandle(Protocol):
    """A later stage, to be called from any thread."""

    def forward(self, number: int, batch: ForwardBatch, hidden: Any) -> tuple[Future[Tensor | None], Any]:
        """`PrefillStage.forward`: its first answer, and something to give to the next stage as `hidden`."""

    def call(self, method: str, *args: Any) -> Future[Any]: ...

    def end(self) -> None:
        """End the stage's process."""


class Chain:
    """The later stages, in order. `layers` are those of each; `on_lost` is called, in any thread, when one is lost."""

    def __init__(self, stages: Sequence[StageHandle], layers: Sequence[range], on_lost: Callable[[str], None]) -> None:
        self.stages = tuple(stages)
        self.layers = tuple(layers)
        self._on_lost = on_lost
        self._numbers = 0
        self._in_flow: deque[Future[Tensor | None]] = deque()
        self._closing = False
        for number, stage in enumerate(self.stages, 1):
            stage.call("loaded").result()
            stage.call("alive").add_done_callback(partial(self._gone, number))

    def _gone(self, number: int, _: Future[Any]) -> None:
        self._lost(f"stage {number} is gone")

    def _lost(self, what: str) -> None:
        if not self._closing:
            self._on_lost(what)

    def stage_of(self, layer: int) -> StageHandle | None:
        """The stage that has a layer; None for the first."""
        return next((stage for stage, layers in zip(self.stages, self.layers, strict=True) if layer in layers), None)

    def pass_on(self, batch: ForwardBatch, hidden: Tensor, on_layer: Callable[[int], None] | None) -> None:
        """Let the stages compute a batch, without waiting for it."""
        passed: Any = hidden
        for stage, layers in zip(self.stages, self.layers, strict=True):
            computed, passed = stage.forward(self._numbers, batch, passed)
            self._in_flow.append(self._followed(computed, layers, on_layer))
        self._numbers += 1

    def _followed(
        self, computed: Future[Tensor | None], layers: range, on_layer: Callable[[int], None] | None
    ) -> Future[Tensor | None]:
        """Done when the stage is and `on_layer` has been told so."""
        told: Future[Tensor | None] = Future()

        def tell(done: Future[Tensor | None]) -> None:
            try:
                logits = done.result()
                if on_layer is not None:
                    for layer in layers:
                        on_layer(layer)
            except Exception as error:
                self._lost(f"a stage failed to compute: {error}")
                told.set_exception(error)
            else:
                told.set_result(logits)

        computed.add_done_callback(tell)
        return told

    def settle(self, most: int = 0) -> Tensor | None:
        """Wait until no more than `most` batches are in the flow; the last logits that came."""
        logits = None
        while len(self._in_flow) > most * len(self.stages):
            logits = self._in_flow.popleft().result()
        return logits

    def in_flow(self) -> list[Future[Tensor | None]]:
        return list(self._in_flow)

    def close(self) -> None:
        self._closing = True
        for stage in self.stages:
            stage.end()


class StagedModel(CausalLM):
    """`first` computes the first layers here, the chain the others. One thread at a time."""

    def __init__(self, first: Llama, chain: Chain) -> None:
        self.stages = 1 + len(chain.stages)
        self.vocab_size = first.vocab_size
        self.max_context = first.max_context
        self.layout = first.layout
        self._first = first
        self._chain = chain

    def forward(self, batch: ForwardBatch, cache: PagedKVCache, *, on_layer: Callable[[int], None] | None = None) -> Tensor:
        self._chain.settle(CHUNKS_PER_STAGE * len(self._chain.stages))
        hidden = self._first.forward_stage(batch, None, cache, on_layer)
        self._chain.pass_on(batch, hidden, on_layer)
        logits = self._chain.settle() if batch.logits else None
        return hidden.new_empty(0, self.vocab_size) if logits is None else logits

    def settle(self) -> None:
        self._chain.settle()


class StagedExchange:
    """The first layers of every block lie here, `local`, the others in the chain's stages."""

    def __init__(self, chain: Chain, cache: DeviceCache, transport: PairedTransports, lease_s: float) -> None:
        self.cuts = tuple(layers.start for layers in chain.layers)
        self._chain = chain
        self._transport = transport
        self._local = LocalExchange(cache, transport, lease_s)
        self._holders: dict[str, StageHandle] = {}

    def publish(self, ids: Sequence[BlockId], layers: range, peer: str | None) -> KVTicket:
        stage = self._chain.stage_of(layers.start)
        if stage is None:
            return self._local.publish(ids, layers, peer)
        ticket: KVTicket = stage.call("publish", ids, layers, self._transport.order(peer)).result()
        self._holders[ticket.id] = stage
        return ticket

    def fetch(self, ticket: KVTicket, ids: Sequence[BlockId], first: int = 0) -> None:
        for batch in self._chain.in_flow():
            batch.exception()  # wait: it may still read what these blocks held before
        stage = self._chain.stage_of(ticket.first_layer)
        if stage is None:
            self._local.fetch(ticket, ids, first)
        else:
            stage.call("fetch", ticket, ids, first).result()

    def release(self, ticket_id: str) -> None:
        holder = self._holders.pop(ticket_id, None)
        if holder is None:
            self._local.release(ticket_id)
        else:
            holder.call("release", ticket_id)

    def expire(self) -> tuple[str, ...]:
        for stage in self._chain.stages:
            stage.call("expire")
        return self._local.expire()

    def close(self) -> None:
        self._chain.close()
        self._local.close()
