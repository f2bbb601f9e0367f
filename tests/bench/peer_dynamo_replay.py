"""Replays a trace with Dynamo's own mock cluster. Run by `peer_dynamo` with an interpreter that has `ai-dynamo-runtime`.

Reads one JSON object from standard input (trace, speeds by router, engine, workers) and prints one with the figures.
"""

from __future__ import annotations

import json
import os
import sys
import time


def replay(task: dict, router: str, speed: float) -> dict:
    from dynamo._core import run_mocker_trace_replay

    started_s = time.perf_counter()
    result = run_mocker_trace_replay(
        [task["trace"]],
        prefill_engine_args={"engine": {**task["engine"], "worker_type": "prefill"}},
        decode_engine_args={"engine": {**task["engine"], "worker_type": "decode"}},
        num_prefill_workers=task["prefill_workers"],
        num_decode_workers=task["decode_workers"],
        router_mode=router,
        arrival_speedup_ratio=speed,
        trace_block_size=task["engine"]["block_size"],
    )
    summary = result.summary
    return {
        "router": router,
        "speed": speed,
        "wall_s": time.perf_counter() - started_s,
        "completed": summary["completed_requests"],
        "hit_ratio": summary["prefix_cache_reused_ratio"],
        "ttft_mean_s": summary["mean_ttft_ms"] / 1e3,
        "ttft_p99_s": summary["p99_ttft_ms"] / 1e3,
        "ttft_max_s": summary["max_ttft_ms"] / 1e3,
    }


def main() -> None:
    task = json.load(sys.stdin)
    os.environ["DYN_LOG"] = "error"
    runs = [replay(task, router, speed) for router, speeds in task["speeds"].items() for speed in speeds]
    json.dump(runs, sys.stdout)


if __name__ == "__main__":
    main()
