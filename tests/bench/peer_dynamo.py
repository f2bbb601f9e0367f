"""Our simulator beside Dynamo's own replay of the same trace on the same mock engine, in one go.

`python -m tests.bench.peer_dynamo TRACE [--peer-python FILE] [--speeds 1 4 ...] [--json FILE]`

The peer runs in an interpreter of its own (`pip install ai-dynamo-runtime ai-dynamo`), named by the flag or by
CONDUCTOR_PEER_PYTHON. `round_robin` on both sides tells whether the engine models agree; `kv_router` against `conductor`,
without and with pulls between prefill workers, compares what schedulers make of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from conductor.core.config import SchedulerConfig
from traces.clusters.profile import load_profile
from traces.formats import open_trace
from traces.schema import TraceRequest
from traces.simulator import SimulationOptions, simulate
from traces.summary import summarise

PEER_SCRIPT = Path(__file__).with_name("peer_dynamo_replay.py")
ROUND_ROBIN_SPEEDS = (1.0, 4.0, 6.0)
WORKERS = 8
Figures = dict[str, object]


def peer_runs(python: str, trace: Path, speeds: Sequence[float]) -> list[Figures]:
    """Dynamo's figures. Raises CalledProcessError when the peer fails."""
    profile = load_profile("dynamo-mocker")
    task = {
        "trace": str(trace),
        "prefill_workers": WORKERS,
        "decode_workers": WORKERS,
        "speeds": {"round_robin": ROUND_ROBIN_SPEEDS, "kv_router": list(speeds)},
        "engine": {
            "num_gpu_blocks": profile.device_blocks,
            "block_size": profile.block_tokens,
            "max_num_batched_tokens": profile.step_tokens,
            "max_num_seqs": profile.max_batch,
            "kv_transfer_bandwidth": profile.network.nic_bytes_per_s / 1e9,
            "kv_transfer_bytes_per_token": profile.kv_bytes_per_token,
        },
    }
    environment = {**os.environ, "DYN_LOG": "error"}
    done = subprocess.run(
        [python, str(PEER_SCRIPT)], input=json.dumps(task), env=environment, text=True, stdout=subprocess.PIPE, check=True
    )
    return list(json.loads(done.stdout))


def our_run(trace: Sequence[TraceRequest], policy: str, speed: float, *, pulls: bool) -> Figures:
    profile = load_profile("dynamo-mocker")
    config = SchedulerConfig(block_tokens=profile.block_tokens, policy=policy, admission="none", allow_pull=pulls)
    options = SimulationOptions(profile, WORKERS, WORKERS, scheduler=config, speed=speed)
    started_s = time.perf_counter()
    run = simulate(trace, options)
    wall_s = time.perf_counter() - started_s
    summary = summarise(run)
    ttft = summary["ttft_s"]
    assert isinstance(ttft, dict)
    return {
        "router": policy if pulls or policy == "round_robin" else f"{policy}, no pulls",
        "speed": speed,
        "wall_s": wall_s,
        "completed": summary["completed"],
        "hit_ratio": summary["token_hit_ratio"],
        "ttft_mean_s": ttft["mean"],
        "ttft_p99_s": ttft["p99"],
        "ttft_max_s": ttft["max"],
    }


def table_of(theirs: Sequence[Figures], ours: Sequence[Figures]) -> Table:
    """One row a run; the ratio is ours over theirs, `round_robin` to `round_robin` and the others to `kv_router`."""
    base = {(run["router"] == "round_robin", run["speed"]): run for run in theirs}
    table = Table(title="Dynamo's replay and ours, 8 prefill + 8 decode mock engines", title_justify="left")
    for column in ("side", "router", "speed", "mean TTFT ms", "ratio", "p99 s", "max s", "hit ratio", "completed", "wall s"):
        table.add_column(column, justify="right" if column != "router" else "left")
    for side, runs in (("theirs", theirs), ("ours", ours)):
        for run in runs:
            peer = base.get((run["router"] == "round_robin", run["speed"]))
            ratio = "" if peer is None or side == "theirs" else f"{run['ttft_mean_s'] / peer['ttft_mean_s']:.4f}"
            table.add_row(
                side,
                str(run["router"]),
                f"{run['speed']:g}",
                f"{run['ttft_mean_s'] * 1e3:,.1f}",
                ratio,
                f"{run['ttft_p99_s']:.2f}",
                f"{run['ttft_max_s']:.2f}",
                f"{run['hit_ratio']:.3f}",
                f"{run['completed']:,}",
                f"{run['wall_s']:.2f}",
            )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peer_dynamo", description=__doc__)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="Mooncake's conversation trace")
    parser.add_argument("--peer-python", default=os.environ.get("CONDUCTOR_PEER_PYTHON"), metavar="FILE")
    parser.add_argument("--speeds", type=float, nargs="+", default=[1, 4, 8, 10, 12, 14])
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; '-' is standard output")
    options = parser.parse_args(arguments)
    trace = list(open_trace(options.trace))
    theirs: list[Figures] = []
    if options.peer_python is None:
        print("peer not run: name its interpreter with --peer-python or CONDUCTOR_PEER_PYTHON", file=sys.stderr)
    else:
        theirs = peer_runs(options.peer_python, options.trace, options.speeds)
    ours = [our_run(trace, "round_robin", speed, pulls=False) for speed in ROUND_ROBIN_SPEEDS]
    ours += [our_run(trace, "conductor", speed, pulls=pulls) for pulls in (False, True) for speed in options.speeds]
    Console(stderr=options.json == "-", width=140).print(table_of(theirs, ours))
    if options.json:
        text = json.dumps({"theirs": theirs, "ours": ours}, indent=2)
        print(text) if options.json == "-" else Path(options.json).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
