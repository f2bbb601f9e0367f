"""The peer's side of the index benchmark: Dynamo's `RadixTree` on the workload of `index_workload.py`.

Run by an interpreter that has `ai-dynamo-runtime` (extra `bench`): `PYTHON peer_dynamo_index.py BLOCKS QUERIES` prints JSON
with the median time of a match in microseconds and a checksum of what was matched. The tree lives in a thread of its own that
the binding talks to, so it is the process's time that counts, not that of the thread that asks.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import index_workload
from dynamo._core import RadixTree


def stored(event_id: int, chain: tuple[int, ...]) -> bytes:
    blocks = [{"block_hash": block, "tokens_hash": block} for block in chain]
    return json.dumps(
        {"event_id": event_id, "data": {"stored": {"parent_hash": None, "blocks": blocks}}, "dp_rank": 0}
    ).encode()


def main(blocks: int, count: int) -> None:
    tree = RadixTree()
    for event_id, (worker, chain) in enumerate(index_workload.placements(blocks)):
        tree.apply_event(worker, stored(event_id, chain))
    times, checksum = [], 0
    for query in index_workload.queries(blocks, count):
        started = time.process_time()
        scores = tree.find_matches(query).scores
        times.append(time.process_time() - started)
        checksum += sum(scores.values())
    print(json.dumps({"match_p50_us": 1e6 * statistics.median(times), "checksum": checksum}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
