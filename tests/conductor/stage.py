"""A running runtime between a scripted scheduler and fake workers."""

from __future__ import annotations

import asyncio
from typing import Any

from conductor.core import commands as cmd
from conductor.core import events as ev
from conductor.core.types import Holder, Role, Tier, TransferReason
from conductor.runtime import ConductorRuntime, Ports
from tests.conductor.doubles import FakeWorker, LostWorkerError, ScriptedScheduler, placement, spec

TRANSFER = cmd.TransferBlocks("t1", Holder("p0", Tier.DEVICE), Holder("d0", Tier.DEVICE), (1, 2), TransferReason.REPLICATE)


def place_arrivals(event: ev.Event) -> list[cmd.Command]:
    """Every request goes to p0, every continuation too."""
    if isinstance(event, ev.RequestArrived | ev.RequestResumed):
        return [cmd.StartPrefill(placement(event.request.id, attempt=event.request.attempt))]
    return []


class Stage:
    """A running runtime with a scripted scheduler and two fake workers."""

    def __init__(self, **options: Any) -> None:
        self.scheduler = ScriptedScheduler(place_arrivals)
        self.fatal: list[Exception] = []
        ports = Ports(is_worker_loss=lambda error: isinstance(error, LostWorkerError), on_fatal=self.fatal.append)
        self.runtime = ConductorRuntime(self.scheduler, ports=ports, **options)
        self.p0, self.d0 = FakeWorker(), FakeWorker()

    async def open(self) -> None:
        self.runtime.start()
        await self.runtime.add_worker(spec("p0"), self.p0, "conductor")
        await self.runtime.add_worker(spec("d0", Role.DECODE, "node-2"), self.d0, "conductor")
        await self.settle()

    async def settle(self) -> None:
        """Let everything that can run, run."""
        for _ in range(30):
            await asyncio.sleep(0)

    async def deliver(self, event: ev.Event, *commands: cmd.Command) -> None:
        """Report `event` and have the scheduler answer it with `commands`."""
        self.scheduler.answer = lambda seen: list(commands) if seen is event else place_arrivals(seen)
        await self.runtime.report([event])
        await self.settle()


async def notices_of(stage: Stage, channel: str = "gateway-1") -> tuple[list[Any], asyncio.Task[None]]:
    """Everything that the channel receives, as it arrives."""
    received: list[Any] = []

    async def collect() -> None:
        async for batch in stage.runtime.notices(channel):
            received.extend(batch)

    task = asyncio.create_task(collect())
    await stage.settle()
    return received, task
