"""A Conductor that is killed: how long until its successor knows what 100,000 cached blocks lie where.

A real local Ray with stand-in workers, so that nothing but the control path is measured: Ray starts the actor again, the
supervisor introduces the workers, each answers with a snapshot. It is back when it places a known prompt on its holder.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path

from conductor.cluster import Cluster
from conductor.core.types import Placement, Role
from conductor.ray_engine_client import RayEngineClient
from tests.bench.harness import Figure, Report, at_most
from tests.live.test_cluster import HELD_BLOCKS, HELD_FIRST, Deployment, config, known_blocks, plan

ROUNDS = 3
LIMIT_S = 5.0


async def rebuild_s(deployment: Deployment) -> float:
    """From the kill to the first placement that counts on what a worker holds."""
    os.kill(await deployment.cluster.conductor.pid.remote(), signal.SIGKILL)
    began_s = time.perf_counter()
    while True:
        try:
            placed = await deployment.client.submit(deployment.job(HELD_FIRST, 1))
        except Exception:  # it is not there yet, in one way or another
            await asyncio.sleep(0.02)
            continue
        if isinstance(placed, Placement) and placed.reuse.reused_tokens:
            return time.perf_counter() - began_s


async def measure(directory: Path) -> list[float]:
    others = tuple(range(1, HELD_BLOCKS // 2))
    plans = [
        plan("prefill-0", Role.PREFILL, holds=others),
        plan("prefill-1", Role.PREFILL, holds=(*known_blocks(), *others)),
        plan("decode-0", Role.DECODE),
    ]
    cluster = Cluster(config(directory))
    cluster.connect()
    try:
        await cluster.start(plans)
        client = RayEngineClient(cluster.conductor, lambda tokens, domain: ())
        await client.start()
        deployment = Deployment(cluster, client, directory)
        await deployment.generate(deployment.job(1, 2))
        seconds = [await rebuild_s(deployment) for _ in range(ROUNDS)]
        await client.close()
    finally:
        await cluster.stop()
    return seconds


def run() -> Report:
    with tempfile.TemporaryDirectory() as directory:
        seconds = asyncio.run(measure(Path(directory)))
    figures = [
        at_most("conductor_back_s", max(seconds), LIMIT_S, "s", f"the longest of {ROUNDS}, {HELD_BLOCKS:,} blocks"),
        Figure("conductor_back_least_s", min(seconds), "s"),
    ]
    return Report("rebuild", figures, "python -m tests.bench rebuild")
