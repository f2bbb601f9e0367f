"""Gateway, engine client, runtime and scheduler in one process, over workers that compute nothing and can be killed.

`python -m tests.bench.stand_in_gateway` prints its port, then answers each line of standard input with one line of JSON:
`kill WORKER` ends a worker in the middle of whatever it does and starts it again after a moment; `sums` tells what is in
flight, how requests have ended, and how much memory the process holds, resident and in use.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import sys
import time
from typing import Any

import psutil

from conductor.core.config import QueueConfig, SchedulerConfig
from conductor.core.events import Tick
from conductor.core.scheduler import Scheduler
from conductor.core.types import Role
from conductor.gateway import GatewaySettings, ServedModel, create_app
from conductor.gateway.server import Server, bind, make_server
from conductor.ray_engine_client import RayEngineClient
from conductor.runtime import ConductorRuntime, Ports
from tests.doubles.byte_tokenizer import ByteTokenizer
from tests.doubles.local_actors import ActorGoneError, LocalHandle
from tests.live.stand_in_workers import BLOCK_TOKENS, StandInConfig, StandInWorker

CONTEXT = 4096
STEP_S = 0.005
RESTART_S = 0.3
BUSY_WITHIN_S = 2.0
PREFILL, DECODE = 4, 4
PLACES = 96
WAITING = 64


class Allocated(ctypes.Structure):
    """What glibc's `mallinfo2` says of its heaps."""

    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in names)


def memory() -> dict[str, int]:
    """Without garbage, and without what is free in the allocator, as far as it can be given back."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.mallinfo2.restype = Allocated
    heaps = libc.mallinfo2()
    return {"resident_bytes": psutil.Process().memory_info().rss, "used_bytes": heaps.uordblks + heaps.hblkhd}


def hash_prompt(tokens: bytes, domain: str) -> tuple[int, ...]:
    size = 4 * BLOCK_TOKENS
    return tuple(hash((domain, tokens[:end])) & (2**64 - 1) for end in range(size, len(tokens) + 1, size))


class Deployment:
    """Everything that a `conductor serve` has, but for Ray and the model."""

    def __init__(self) -> None:
        config = SchedulerConfig(block_tokens=BLOCK_TOKENS, queue=QueueConfig(max_requests=PLACES // 2))
        self.scheduler = Scheduler(config)
        ports = Ports(is_worker_loss=lambda error: isinstance(error, ActorGoneError))
        self.runtime = ConductorRuntime(self.scheduler, None, ports)
        self.conductor = LocalHandle(self.runtime)
        self.workers: dict[str, LocalHandle] = {}
        self.roles = {f"prefill-{n}": Role.PREFILL for n in range(PREFILL)} | {
            f"decode-{n}": Role.DECODE for n in range(DECODE)
        }
        self.client = RayEngineClient(self.conductor, hash_prompt)
        served = ServedModel(("stand-in",), CONTEXT, ByteTokenizer(), hash_prompt)
        settings = GatewaySettings(max_in_flight=PLACES, max_waiting=WAITING)
        self.server: Server = make_server(create_app(self.client, served, settings))

    async def start_worker(self, name: str) -> None:
        worker = StandInWorker(StandInConfig(name, self.roles[name], STEP_S))
        handle = self.workers[name] = LocalHandle(worker)
        await self.runtime.add_worker(await worker.describe(), handle, self.conductor)

    async def kill(self, name: str) -> dict[str, Any]:
        """End a worker in the middle of its work, if work comes to it within a while."""
        handle = self.workers[name]
        until_s = asyncio.get_running_loop().time() + BUSY_WITHIN_S
        while not await handle.actor.running() and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(0.001)
        running = handle.actor.kill()
        handle.kill()
        await asyncio.sleep(RESTART_S)
        await self.start_worker(name)
        return {"killed": name, "running": running}

    def sums(self) -> dict[str, Any]:
        self.scheduler.handle(Tick(), time.monotonic())  # forgets what has expired
        self.scheduler.check()
        service = self.server.service
        held = {
            "gateway": service.in_flight,
            "active": sum(account.active for account in service.access.accounts),
            "gauge_in_flight": service.metrics.in_flight,
            "gauge_waiting": service.metrics.waiting,
            "waiting_room": len(service.room),
            "client": len(self.client._requests),
            "conductor": len(self.runtime._in_flight),
            "scheduler": len(self.scheduler._requests),
            "workers": sum(len(handle.actor._running) for handle in self.workers.values()),
            "reserved_blocks": int(self.scheduler._view.decode.reserved_blocks.sum()),
            "prefill_jobs": int(self.scheduler._view.prefill.jobs.sum()),
        }
        ended = {outcome.value: count for outcome, count in self.scheduler._requests.ended.items()}
        return {"held": held, "ended": ended, **memory()}

    async def run(self) -> None:
        for name in self.roles:
            await self.start_worker(name)
        await self.client.start()
        listener = bind("127.0.0.1", 0)
        print(listener.getsockname()[1], flush=True)
        listening = asyncio.ensure_future(self.listen())
        await self.server.serve(sockets=[listener])
        listening.cancel()

    async def listen(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := (await reader.readline()).decode().split():
            answer = self.sums() if line[0] == "sums" else await self.kill(line[1])
            print(json.dumps(answer), flush=True)
        self.server.begin_drain()


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # killed workers complain
    asyncio.run(Deployment().run())
