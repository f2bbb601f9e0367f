"""Prefill workers in stages, all in this process: every later stage has an event loop of its own, in a thread, and can die."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.base import ForwardBatch, PagedKVCache
from models.llama import Llama
from models.load import load_model
from models.stages import Share
from tests.workers.actor_doubles import PROFILE, PeerDied
from tests.workers.doubles import ROOT
from workers.assembly import WorkerParts, make_cache
from workers.config import WorkerConfig
from workers.engine import Engine
from workers.kv_transfer.loopback import Fabric, LoopbackTransport
from workers.stage import PrefillStage, StageParts
from workers.staged import Chain, StagedExchange, StagedModel


class HeldModel:
    """A stage's model that can be kept from computing."""

    def __init__(self, model: Llama) -> None:
        self._model = model
        self.layers = model.layers
        self.open = threading.Event()
        self.open.set()
        self.computed: list[int] = []
        self.broken = False

    def forward_stage(self, batch: ForwardBatch, hidden: Tensor | None, cache: PagedKVCache) -> Tensor:
        assert self.open.wait(20)
        if self.broken:
            raise RuntimeError("out of memory")
        self.computed.append(batch.context_lens[0])
        return self._model.forward_stage(batch, hidden, cache)


class ThreadStage:
    def __init__(self, stage: PrefillStage, model: HeldModel) -> None:
        self.stage, self.model = stage, model
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._alive: Future[Any] = Future()
        self._pending: set[Future[Any]] = set()

    def call(self, method: str, *args: Any) -> Future[Any]:
        return self._alive if method == "alive" else self._start(getattr(self.stage, method)(*args))

    def forward(self, number: int, batch: ForwardBatch, hidden: Any) -> tuple[Future[Tensor | None], Any]:
        both = self._start(self._forward(number, batch, hidden))
        logits: Future[Tensor | None] = Future()
        both.add_done_callback(lambda done: _pass(done, logits))
        return logits, both

    async def _forward(self, number: int, batch: ForwardBatch, hidden: Any) -> Any:
        passed = (await asyncio.wrap_future(hidden))[1] if isinstance(hidden, Future) else hidden
        return await self.stage.forward(number, batch, passed)

    def _start(self, work: Any) -> Future[Any]:
        started = asyncio.run_coroutine_threadsafe(work, self._loop)
        if self._alive.done():
            started.cancel()
            started = Future()
            started.set_exception(PeerDied("the stage is dead"))
        return started

    def die(self) -> None:
        self._alive.set_exception(PeerDied("the stage is dead"))

    def end(self) -> None:
        asyncio.run_coroutine_threadsafe(self.stage.close(), self._loop).result(20)
        assert self.stage.transport.offered == 0
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()


def _pass(done: Future[Any], logits: Future[Tensor | None]) -> None:
    error = done.exception()
    if error is None:
        logits.set_result(done.result()[0])
    else:
        logits.set_exception(error)


@dataclass
class Group:
    """Builds the parts of one worker in `stages` stages over the model in `folder`."""

    fabric: Fabric
    folder: Path
    stages: int
    later: list[ThreadStage] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def __call__(self, config: WorkerConfig) -> WorkerParts:
        torch.set_num_threads(1)
        first, *others = [self._share(number) for number in range(self.stages)]
        for model in others:
            held = HeldModel(model)
            stage = PrefillStage(config, len(self.later) + 1, partial(self._parts, held, model))
            self.later.append(ThreadStage(stage, held))
        chain = Chain(self.later, [model.layers for model in others], self.lost.append)
        cache = make_cache(config, first.layout, first.layers)
        transports = {"loopback": LoopbackTransport(cache.kv, self.fabric)}
        engine = Engine(StagedModel(first, chain), cache)
        exchange = partial(StagedExchange, chain)
        return WorkerParts(engine, transports, PROFILE, "tiny", lambda domain: ROOT, exchange=exchange)

    def _share(self, number: int) -> Llama:
        model = load_model(str(self.folder), share=Share(number, self.stages)).model
        assert isinstance(model, Llama)
        return model

    def _parts(self, held: Any, model: Llama, config: WorkerConfig, number: int) -> StageParts:
        cache = make_cache(config, model.layout, model.layers)
        return StageParts(held, cache, {"loopback": LoopbackTransport(cache.kv, self.fabric)})
