"""What one scheduling decision costs, and the prefix index by itself and beside Dynamo's.

Decision: `RequestArrived` in, commands out (with the `Tick` that the line asks for at once), on 64 prefill + 64 decode workers
with a million blocks indexed; every request is ended again outside of the clock. Times are those of the one thread that
works, so that other processes do not count; a match is timed in all threads of its process, since Dynamo's tree lives in a
thread of its own. Run `python -m tests.bench decision`; set CONDUCTOR_PEER_PYTHON to an interpreter with `ai-dynamo-runtime`
for the comparison.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from conductor.core.commands import StartPrefill
from conductor.core.config import SchedulerConfig
from conductor.core.cost_profile import CostProfile
from conductor.core.events import (
    BlocksStored,
    Event,
    IndexSnapshot,
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    Tick,
    WorkerJoined,
)
from conductor.core.prefix_index import PrefixIndex
from conductor.core.scheduler import Scheduler
from conductor.core.types import Holder, Request, Role, Stamp, Tier, WorkerSpec
from tests.bench import index_workload
from tests.bench.harness import Figure, Report, at_least, at_most

BLOCKS = 1_000_000
MANY_BLOCKS = int(os.environ.get("CONDUCTOR_BENCH_BLOCKS", "10_000_000"))
SNAPSHOT_BLOCKS = 150_000
QUERIES = 3000
PEER_PYTHON = "CONDUCTOR_PEER_PYTHON"


def profile() -> CostProfile:
    """A worker of the size of LLaMA3-70B on eight A800 (FAST'25, section 5)."""
    return CostProfile(
        prefill_base_s=0.02,
        prefill_per_token_s=8e-5,
        prefill_per_token2_s=4e-10,
        decode_base_s=0.02,
        decode_per_sequence_s=1e-4,
        decode_per_context_token_s=1e-8,
        kv_bytes_per_token=327_680,
        block_tokens=64,
        transfer_latency_s=1e-3,
        transfer_bytes_per_s=50e9,
        samples=100,
    )


def worker(number: int, role: Role) -> WorkerSpec:
    capacity = {Tier.DEVICE: 100_000}
    return WorkerSpec(f"{role}-{number:03}", role, f"node-{role}-{number}", profile(), capacity, nic_bytes_per_s=100e9)


def loaded_scheduler(workers: int, blocks: int) -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(block_tokens=64))
    for number in range(workers):
        scheduler.handle(WorkerJoined(worker(number, Role.PREFILL), 1), 0.0)
        scheduler.handle(WorkerJoined(worker(number, Role.DECODE), 1), 0.0)
    sequence = dict.fromkeys(range(workers), 0)
    for held_by, chain in index_workload.placements(blocks):
        number = held_by % workers
        sequence[number] += 1
        stamp = Stamp(f"{Role.PREFILL}-{number:03}", 1, sequence[number])
        scheduler.handle(BlocksStored(stamp, Tier.DEVICE, None, chain), 0.0)
    return scheduler


def decision_times_us(scheduler: Scheduler, prompts: Sequence[Sequence[int]], start_s: float = 1000.0) -> list[float]:
    """Microseconds of each decision, a few dozen requests decoding meanwhile. `start_s` must grow from call to call."""
    times, now, in_flight = [], start_s, []
    gc.collect()
    gc.freeze()
    for hashes in prompts:
        now += 0.01
        request = Request(f"r{now:.2f}", 64 * len(hashes) + 17, tuple(hashes), max_output_tokens=200)
        event = RequestArrived(request)
        started = time.thread_time()
        commands = scheduler.handle(event, now) or scheduler.handle(Tick(), now)
        times.append(1e6 * (time.thread_time() - started))
        (command,) = commands
        assert isinstance(command, StartPrefill), "an arrival on a cluster without queues is placed at once"
        placed, reuse = command.placement.prefill, command.placement.reuse
        scheduler.handle(PrefillFinished(request.id, 1, placed, reuse.reused_tokens, command.placement.ttft.prefill_s), now)
        in_flight.append(request.id)
        if len(in_flight) > 32:
            scheduler.handle(RequestCancelled(in_flight.pop(0)), now)
    for request_id in in_flight:
        scheduler.handle(RequestCancelled(request_id), now)
    return times


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def long_prompts(count: int) -> list[list[int]]:
    draw = random.Random("long")
    return [[*index_workload.chain(draw.randrange(4000)), *(draw.getrandbits(64) for _ in range(1812))] for _ in range(count)]


def built_index(blocks: int) -> PrefixIndex:
    index = PrefixIndex()
    for number in range(index_workload.WORKERS):
        index.add(Holder(f"w{number}", Tier.DEVICE))
    for number, chain in index_workload.placements(blocks):
        index.store(Holder(f"w{number}", Tier.DEVICE), None, chain)
    return index


def match_us(index: PrefixIndex, queries: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Median time of a match, of all threads that take part in it as for the peer, and a checksum of all that was matched."""
    times, checksum = [], 0
    for query in queries:
        started = time.process_time()
        depths = index.match(query).depths
        times.append(time.process_time() - started)
        checksum += int(depths.sum())
    return 1e6 * statistics.median(times), checksum


def peer_match_us(python: str, blocks: int, count: int) -> tuple[float, int]:
    script = Path(__file__).with_name("peer_dynamo_index.py")
    done = subprocess.run([python, str(script), str(blocks), str(count)], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    return float(result["match_p50_us"]), int(result["checksum"])


def single_holder_chains(blocks: int) -> Iterator[tuple[int, ...]]:
    """Chains of 128-bit hashes, each held by one worker and by nobody else's hand once it is stored."""
    draw = random.Random("memory")
    for _ in range(blocks // index_workload.CHAIN_BLOCKS):
        yield tuple(draw.getrandbits(128) for _ in range(index_workload.CHAIN_BLOCKS))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_memory_and_pauses(blocks: int) -> dict[str, float]:
    """Build, match, remove and discard `blocks` blocks, timing every call. Meant for a process of its own."""
    index, pauses = PrefixIndex(), [0.0]
    holders = [Holder(f"w{number}", Tier.DEVICE) for number in range(index_workload.WORKERS)]
    for holder in holders:
        index.add(holder)
    gc.collect()
    gc.freeze()
    before, kept = resident_bytes(), []

    def timed(call: object, *arguments: object) -> None:
        started = time.thread_time()
        call(*arguments)  # type: ignore[operator]
        pauses.append(time.thread_time() - started)

    for number, chain in enumerate(single_holder_chains(blocks)):
        timed(index.store, holders[number % len(holders)], None, chain)
        if number % 97 == 0:
            kept.append((holders[number % len(holders)], chain))
    per_block = (resident_bytes() - before) / index.num_blocks
    for holder, chain in kept:
        timed(index.match, chain)
        timed(index.remove, holder, chain[::-1])
    for holder in holders[::2]:
        timed(index.discard, holder)
    for holder in holders[1::2] * 64:
        timed(index.store, holder, None, kept[0][1])
    pauses.sort()
    return {
        "bytes_per_block": per_block,
        "max_pause_ms": 1e3 * pauses[-1],
        "pause_p999_ms": 1e3 * pauses[int(0.999 * len(pauses))],
    }


def snapshot_pauses_ms(scheduler: Scheduler, blocks: int) -> list[float]:
    """Milliseconds of every call while a worker's snapshot of `blocks` blocks is taken in."""
    draw = random.Random("snapshot")
    held = tuple(draw.getrandbits(128) for _ in range(blocks))
    now, pauses = 5000.0, []

    def timed(event: Event) -> None:
        started = time.thread_time()
        scheduler.handle(event, now)
        pauses.append(1e3 * (time.thread_time() - started))

    timed(IndexSnapshot(Stamp(f"{Role.PREFILL}-000", 2, 1), {Tier.DEVICE: held}))
    while (deadline := scheduler.next_deadline()) is not None:
        now = max(now, deadline)
        timed(Tick())
    assert scheduler._index.num_claims(Holder(f"{Role.PREFILL}-000", Tier.DEVICE)) == blocks
    return pauses


def in_child(blocks: int) -> dict[str, float]:
    code = f"import json; from tests.bench.bench_decision import *; print(json.dumps(measure_memory_and_pauses({blocks})))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    return {name: float(value) for name, value in json.loads(done.stdout).items()}


def peer_figure(rounds: int = 3) -> Figure:
    """Both sides in turn, several times; the best of each counts, since everything that disturbs makes it slower."""
    index, queries = built_index(BLOCKS), index_workload.queries(BLOCKS, QUERIES)
    python = os.environ.get(PEER_PYTHON)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(match_us(index, queries))
        if python is not None:
            theirs.append(peer_match_us(python, BLOCKS, QUERIES))
    ours_us = min(ours)[0]
    if not theirs:
        note = f"peer not measured: set {PEER_PYTHON} to a Python with ai-dynamo-runtime; ours {ours_us:.1f} us"
        return Figure("match_vs_dynamo", None, "ratio", ">= 1", None, note)
    assert theirs[0][1] == ours[0][1], f"the peer matched {theirs[0][1]} blocks, we {ours[0][1]}"
    theirs_us = min(theirs)[0]
    return at_least("match_vs_dynamo", theirs_us / ours_us, 1.0, "ratio", f"theirs {theirs_us:.1f} us, ours {ours_us:.1f} us")


def run() -> Report:
    scheduler = loaded_scheduler(index_workload.WORKERS, BLOCKS)
    decision_times_us(scheduler, index_workload.queries(BLOCKS, 200))
    usual = decision_times_us(scheduler, index_workload.queries(BLOCKS, QUERIES), 2000.0)
    long = decision_times_us(scheduler, long_prompts(500), 3000.0)
    few = decision_times_us(loaded_scheduler(8, 100_000), index_workload.queries(100_000, 1000))
    growth = statistics.median(usual) / statistics.median(few)
    pauses_ms = snapshot_pauses_ms(scheduler, SNAPSHOT_BLOCKS)
    child = in_child(MANY_BLOCKS)
    figures = [
        at_most("decision_p50_us", statistics.median(usual), 200, "us", "188 blocks, 64 + 64 workers, 1M blocks"),
        at_most("decision_p99_us", percentile(usual, 0.99), 1000, "us"),
        at_most("long_decision_p50_us", statistics.median(long), 600, "us", "2,000 blocks"),
        at_most("cost_64_over_8_workers", growth, 8, "ratio", "linear would be 8"),
        peer_figure(),
        at_most("bytes_per_block", child["bytes_per_block"], 200, "B", f"{MANY_BLOCKS:,} blocks, one holder each"),
        at_most("max_pause_ms", child["max_pause_ms"], 10, "ms", f"p99.9 {child['pause_p999_ms']:.2f} ms"),
        at_most(
            "snapshot_pause_ms", max(pauses_ms), 10, "ms", f"{SNAPSHOT_BLOCKS:,} blocks of one worker, {len(pauses_ms)} calls"
        ),
    ]
    return Report("decision", figures, "python -m tests.bench decision")
