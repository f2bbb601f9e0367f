"""What a prefix costs to bring up from each tier, against copying it once and against computing it again.

The tiers hold the real KV of a 2,048-token prompt of the default model, written by another process. Disk and shared directory
are read with the page cache emptied of their files. Write-behind is timed as the prefill that it runs beside.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from conductor.core.hashing import hash_blocks
from conductor.core.messages import SamplingParams
from conductor.core.types import BlockHash, Tier
from tests.bench.bench_first_light import tokens
from tests.bench.harness import Figure, Report, at_least, at_most
from tests.bench.in_process import BLOCK_TOKENS, CHUNK_TOKENS, engine
from workers.block_pool import OutOfBlocks
from workers.block_rows import pool_rows, restore
from workers.kv_store.base import BlockFormat, KVTier, NewBlock
from workers.kv_store.files import Files
from workers.kv_store.hierarchy import Hierarchy
from workers.kv_store.opening import OpenedTiers, open_tiers
from workers.kv_store.settings import StoreSettings
from workers.sequence import Prompt

PROMPT_TOKENS = 2048
ROOT_HASH = 7
WRITTEN_TOKENS, WRITTEN_CHUNK = 1024, 256  # so that writing overlaps most of the computing
ROUNDS, MEMORY_ROUNDS = 7, 25
NODE = "bench"


def settings(root: Path) -> StoreSettings:
    return StoreSettings(
        deployment=f"bench-{root.name}",
        host_bytes=1 << 30,
        disk_directory=root / "disk",
        disk_bytes=1 << 30,
        shared_paths=(str(root / "shared"),),
        shared_bytes=1 << 30,
    )


def block_format() -> BlockFormat:
    return BlockFormat("bench", engine().cache.kv)


def names_of(count: int) -> tuple[BlockHash, ...]:
    """Hashes of a prompt of so many tokens that nobody else has."""
    packed = b"".join(token.to_bytes(4, "little") for token in tokens(count, "tiers"))
    return hash_blocks(ROOT_HASH, packed, BLOCK_TOKENS)


def fill(root: Path) -> None:
    """Compute the prompt and put it into every tier; runs in a process of its own."""
    prefill("tiers", lambda names: None)
    names = names_of(PROMPT_TOKENS)
    opened = open_tiers(settings(root), block_format(), NODE)
    with pool_rows(engine().cache, names, 0) as rows:
        blocks = [
            NewBlock(name, names[at - 1] if at else None, row) for at, (name, row) in enumerate(zip(names, rows, strict=True))
        ]
        for tier in opened.tiers:
            tier.put(blocks)
    print("filled", flush=True)
    with suppress(EOFError):
        input()  # host memory lives as long as somebody has it open


def prefill(
    seed: str, after_chunk: Callable[[Sequence[BlockHash]], None], count: int = PROMPT_TOKENS, chunk_tokens: int = CHUNK_TOKENS
) -> tuple[float, float]:
    """Seconds to compute a prompt, on the clock and of its own thread; `after_chunk` gets the hashes named so far."""
    running = engine()
    ids = tokens(count, seed)
    packed = b"".join(token.to_bytes(4, "little") for token in ids)
    prompt = Prompt(tuple(ids), hash_blocks(ROOT_HASH, packed, BLOCK_TOKENS), ROOT_HASH, SamplingParams(max_tokens=1))
    sequence = running.begin(prompt)
    assert not isinstance(sequence, OutOfBlocks)
    began_s, began_cpu_s = time.perf_counter(), time.thread_time()
    while sequence.computed < len(ids):
        running.prefill_chunk(sequence, min(chunk_tokens, len(ids) - sequence.computed))
        after_chunk(sequence.hashes[: sequence.named])
    seconds = time.perf_counter() - began_s, time.thread_time() - began_cpu_s
    running.finish(sequence)
    return seconds


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def restore_s(tier: KVTier, names: Sequence[BlockHash], cold: Path | None) -> float:
    """Least seconds until a prefix is in the device pool; with `cold`, its files are dropped from the page cache first."""
    cache, seconds = engine().cache, []
    for _ in range(ROUNDS):
        cache.evict_idle()
        for path in cold.rglob("*") if cold else ():
            if path.is_file():
                Files().sync(path)
                Files().forget_pages(path)
        seconds.append(timed(lambda: restored(tier, names)))
    return min(seconds)


def restored(tier: KVTier, names: Sequence[BlockHash]) -> None:
    blocks = restore(engine().cache, tier, names).blocks
    if blocks != len(names):
        raise RuntimeError(f"{blocks} of {len(names)} blocks came from the {tier.tier.name.lower()} tier")


def copied_and_mapped_s(tier: KVTier, names: Sequence[BlockHash]) -> tuple[float, float]:
    """Seconds to copy as many bytes as a prefix has, and to map and verify it where it lies: by turns, each at its least
    disturbed."""
    nbytes = len(names) * tier.format.block_bytes
    source, target = np.ones(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8)

    def read() -> None:
        with tier.read(names) as rows:
            assert len(rows) == len(names)

    turns = [(timed(lambda: np.copyto(target, source)), timed(read)) for _ in range(MEMORY_ROUNDS)]
    copied, mapped = zip(*turns, strict=True)
    return min(copied), min(mapped)


def write_behind_costs(opened: OpenedTiers, rounds: int = 6) -> tuple[float, float]:
    """Time of a prefill that is written to every tier behind its back, over one that is not, less 1: on the clock, and of its
    own thread alone. Both sides take turns, and each counts at its least disturbed."""
    plain: list[tuple[float, float]] = []
    written: list[tuple[float, float]] = []
    store = Hierarchy(opened, partial(pool_rows, engine().cache), 4096)
    for number in range(rounds):
        plain.append(prefill(f"plain-{number}", lambda names: None, WRITTEN_TOKENS, WRITTEN_CHUNK))
        written.append(prefill(f"written-{number}", partial(keep, store, [0]), WRITTEN_TOKENS, WRITTEN_CHUNK))
        if not store.flush(60.0):
            raise RuntimeError("the tiers did not take a prompt within a minute")
    on_clock, of_thread = (min(seconds) for seconds in zip(*written, strict=True))
    plain_s, plain_thread_s = (min(seconds) for seconds in zip(*plain, strict=True))
    return on_clock / plain_s - 1, of_thread / plain_thread_s - 1


def keep(store: Hierarchy, sent: list[int], names: Sequence[BlockHash]) -> None:
    store.keep(names, "chat", len(names) - sent[0])
    sent[0] = len(names)


def run() -> Report:
    root = Path(tempfile.mkdtemp(prefix="tiers-"))
    filler = subprocess.Popen(
        [sys.executable, "-c", f"from tests.bench.bench_tiers import *; fill(Path({str(root)!r}))"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert filler.stdout is not None
    opened = OpenedTiers()
    try:
        if filler.stdout.readline() != b"filled\n":
            raise RuntimeError("the process that fills the tiers has failed")
        opened = open_tiers(settings(root), block_format(), NODE)
        return Report("tiers", figures(opened, root), "python -m tests.bench tiers")
    finally:
        filler.communicate(b"\n")
        for tier in opened.tiers:
            tier.close()
        shutil.rmtree(root)


def figures(opened: OpenedTiers, root: Path) -> list[Figure]:
    names = names_of(PROMPT_TOKENS)
    nbytes = len(names) * block_format().block_bytes
    tiers = {tier.tier: tier for tier in opened.tiers}
    copy_s, map_s = copied_and_mapped_s(tiers[Tier.HOST], names)
    host_s = restore_s(tiers[Tier.HOST], names, None)
    disk_s = restore_s(tiers[Tier.DISK], names, root / "disk")
    shared_s = restore_s(tiers[Tier.SHARED], names, root / "shared")
    cost, thread_cost = write_behind_costs(opened)
    compute_s = min(prefill(f"again-{number}", lambda names: None)[0] for number in range(2))
    size = f"{nbytes / 1e6:.0f} MB, memcpy {1000 * copy_s:.1f} ms"
    return [
        at_most("host_map_over_memcpy", map_s / copy_s, 1.5, "ratio", f"mapped and verified in {1000 * map_s:.1f} ms; {size}"),
        Figure("host_restore_over_memcpy", host_s / copy_s, "ratio", note=f"into the device pool in {1000 * host_s:.1f} ms"),
        at_least(
            "disk_over_compute", compute_s / disk_s, 50, "times", f"cold, {1000 * disk_s:.0f} ms; computing {compute_s:.1f} s"
        ),
        at_least("shared_over_compute", compute_s / shared_s, 30, "times", f"cold, {1000 * shared_s:.0f} ms"),
        at_most("write_behind_cost", cost, 0.03, "of a prefill", "to host memory, disk and shared directory"),
        Figure("write_behind_thread_cost", thread_cost, "of a prefill", note="of the computing thread's own time"),
    ]
