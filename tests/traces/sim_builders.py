"""Small traces, clusters and runs for the tests of the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from conductor.core.commands import Command
from conductor.core.config import SchedulerConfig
from conductor.core.events import Event
from traces.clusters.profile import ClusterProfile, load_profile
from traces.schema import TraceRequest
from traces.sim.loop import EventLoop
from traces.simulator import Simulation, SimulationOptions

Call = tuple[float, Event, tuple[Command, ...]]


def profile(**changes: Any) -> ClusterProfile:
    """The mock engine's profile with `changes`, validated."""
    return ClusterProfile.model_validate({**load_profile("dynamo-mocker").model_dump(), **changes})


def row(at_s: float, prompt: int, output: int = 4, first_block: int | None = None, shared: int = 0) -> TraceRequest:
    """A request whose first `shared` blocks are the same in all rows; the others are its own, named from `first_block` on."""
    own = 1_000_000 + int(at_s * 1000) * 1000 if first_block is None else first_block
    blocks = -(-prompt // 512)
    return TraceRequest(at_s, prompt, output, tuple([*range(shared), *range(own, own + blocks)][:blocks]))


def options(cluster: ClusterProfile | None = None, **changes: Any) -> SimulationOptions:
    """Round robin over 2 + 2 mock engines that refuse nothing, with `changes`."""
    config = SchedulerConfig(block_tokens=512, policy=changes.pop("policy", "round_robin"), admission="none")
    chosen = SimulationOptions(cluster or profile(), prefill_workers=2, decode_workers=2, scheduler=config)
    return replace(chosen, **changes)


def run(trace: Iterable[TraceRequest], chosen: SimulationOptions | None = None) -> tuple[Simulation, list[Call]]:
    """Simulate to the end, checking the scheduler's invariants after every event."""
    calls: list[Call] = []

    def observe(now: float, event: Event, commands: Sequence[Command]) -> None:
        calls.append((now, event, tuple(commands)))
        simulation.scheduler.check()

    simulation = Simulation(chosen or options(), observe)
    simulation.feed(trace)
    simulation.run()
    return simulation, calls


def run_loop(loop: EventLoop) -> None:
    loop.run(lambda: None)
