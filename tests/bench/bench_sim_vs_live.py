"""Sixty scaled requests of the conversation look-alike through `conductor serve`, and through the simulator.

The cluster that serves is the default one (2 prefill + 1 decode workers, the default model) without the host's cache, which the
simulated one does not have. Its workers measure themselves anew before they serve; that measurement is the truth of the
simulation, whose workers share this machine's processors as the real ones do. How much processors crowd one another is measured
beforehand, and what the gateway, the Conductor, Ray and the client take of them, while they serve. On a machine that does other
work too, the two are as far apart as its load changes meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import yaml

from conductor.core.config import SchedulerConfig
from conductor.core.types import SLO
from models.cache import cache_root
from tests.bench.crowding import crowding, overhead_cpu_s
from tests.bench.harness import Figure, Report, at_most
from tests.bench.served import serve
from traces.clusters.measured import measured_profile
from traces.clusters.profile import ClusterProfile, load_profile
from traces.generate import generate
from traces.outcomes import RunResult
from traces.replay import LiveOptions, replay_live
from traces.schema import TraceRequest
from traces.simulator import SimulationOptions, simulate
from traces.summary import summarise
from traces.synthesize import scaled

REQUESTS, SEED = 60, 4
SCALE = 1 / 8  # a block of 512 tokens becomes one of 64, the block of the live cluster
SPEED = 0.025  # the look-alike comes in bursts, each of which is then worked off before the next: work does not pile up
CONTEXT_TOKENS = 8192  # of the default model: the service refuses more, and the simulator knows no such limit
PREFILL, DECODE = 2, 1
SETTINGS = {
    "workers": {"prefill": PREFILL, "decode": DECODE, "prefill_blocks": 384, "decode_blocks": 384, "max_batch": 16},
    "store": {"host_mib": 0},
    "scheduler": {"admission": "none"},  # who is refused is not in the mean
}


@contextmanager
def unmeasured_cache(folder: Path) -> Iterator[Path]:
    """The model's cache without the profiles that earlier runs have left."""
    folder.mkdir()
    for entry in cache_root().iterdir():
        if entry.name != "profiles":
            (folder / entry.name).symlink_to(entry)
    before = os.environ.get("CONDUCTOR_CACHE")
    os.environ["CONDUCTOR_CACHE"] = str(folder)
    try:
        yield folder
    finally:
        del os.environ["CONDUCTOR_CACHE"]
        if before is not None:
            os.environ["CONDUCTOR_CACHE"] = before


def fitting(requests: int) -> list[TraceRequest]:
    """The first requests of the look-alike that, scaled, the model's context holds."""
    drawn = generate("conversation", 2 * requests, SEED)
    rows = ((request, scaled(request, SCALE)) for request in drawn)
    return [request for request, row in rows if row.input_tokens + row.output_tokens <= CONTEXT_TOKENS][:requests]


def replay(trace: list[TraceRequest], port: int) -> RunResult:
    options = LiveOptions(f"http://127.0.0.1:{port}", speed=SPEED, scale=SCALE)
    return asyncio.run(replay_live(trace, options))


def simulated(trace: list[TraceRequest], cluster: ClusterProfile) -> RunResult:
    config = SchedulerConfig(block_tokens=cluster.block_tokens, slo=SLO(), admission="none")
    rows = [scaled(request, SCALE) for request in trace]
    return simulate(rows, SimulationOptions(cluster, PREFILL, DECODE, scheduler=config, speed=SPEED))


def measured_cluster(folder: Path, processors: Mapping[str, float]) -> ClusterProfile:
    found = measured_profile(load_profile("smollm2-cpu"), folder / "profiles")
    if found is None:
        raise RuntimeError(f"the workers have left no profile in {folder}")
    workers = SETTINGS["workers"]
    as_served = {"device_blocks": workers["prefill_blocks"], "max_batch": workers["max_batch"], "processors": processors}
    return ClusterProfile.model_validate(found[0].model_dump() | as_served)


def run() -> Report:
    trace = fitting(REQUESTS)
    with tempfile.TemporaryDirectory() as scratch, unmeasured_cache(Path(scratch) / "cache") as cache:
        settings = Path(scratch) / "conductor.yaml"
        settings.write_text(yaml.safe_dump(SETTINGS), encoding="utf-8")
        crowded = crowding()
        with serve("--config", str(settings)) as served:
            began_s, used_s = time.perf_counter(), overhead_cpu_s(served)
            live = summarise(replay(trace, served.port))
            elsewhere = (overhead_cpu_s(served) - used_s) / (time.perf_counter() - began_s)
        processors = {"count": (os.cpu_count() or 1) - elsewhere, "crowding": crowded}
        ours = summarise(simulated(trace, measured_cluster(cache, processors)))
    shared = [Figure("processors_left", processors["count"], "processors"), Figure("crowding", crowded, "of a step alone")]
    shown = {"live": live, "simulated": ours}
    return Report("sim_vs_live", shared + figures(live, ours), "python -m tests.bench sim_vs_live", shown)


def figures(live: dict[str, object], ours: dict[str, object]) -> list[Figure]:
    live_s, ours_s = (cast(dict[str, float], report["ttft_s"])["mean"] for report in (live, ours))
    live_hits, ours_hits = (cast(float, report["token_hit_ratio"]) for report in (live, ours))
    return [
        Figure("live_completed", float(cast(int, live["completed"])), "requests", f"{REQUESTS}", live["completed"] == REQUESTS),
        Figure("live_mean_ttft", live_s, "s"),
        Figure("simulated_mean_ttft", ours_s, "s"),
        at_most("ttft_apart", abs(ours_s / live_s - 1), 0.2, "of live", f"simulated / live = {ours_s / live_s:.3f}"),
        Figure("live_hits", live_hits, "of tokens"),
        Figure("simulated_hits", ours_hits, "of tokens"),
        at_most("hits_apart", abs(ours_hits - live_hits) * 100, 2.0, "points"),
    ]
