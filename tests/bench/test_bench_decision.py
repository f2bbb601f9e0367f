"""The decision benchmark runs, on sizes that take no time, and measures what it says."""

from __future__ import annotations

from conductor.core.types import Holder, Tier
from tests.bench import index_workload
from tests.bench.bench_decision import (
    built_index,
    decision_times_us,
    in_child,
    loaded_scheduler,
    long_prompts,
    match_us,
    snapshot_pauses_ms,
)

BLOCKS = 4000


def test_requests_of_the_benchmark_are_decided() -> None:
    """Usual and long prompts both end in commands, and nothing stays inconsistent."""
    scheduler = loaded_scheduler(16, BLOCKS)
    assert len(decision_times_us(scheduler, index_workload.queries(BLOCKS, 40))) == 40
    assert len(decision_times_us(scheduler, long_prompts(5), 2000.0)) == 5
    scheduler.check()


def test_matches_of_the_benchmark_find_what_was_placed() -> None:
    """The checksum that is compared with the peer's is the sum of depths that plain sets give."""
    index = built_index(BLOCKS)
    held: dict[int, set[int]] = {number: set() for number in range(index_workload.WORKERS)}
    for number, chain in index_workload.placements(BLOCKS):
        held[number] |= set(chain)
    queries = index_workload.queries(BLOCKS, 30)
    wanted = sum(
        next((depth for depth, block in enumerate(query) if block not in blocks), len(query))
        for query in queries
        for blocks in held.values()
    )
    assert match_us(index, queries)[1] == wanted
    assert index.num_claims(Holder("w0", Tier.DEVICE)) == len(held[0])


def test_a_snapshot_of_the_benchmark_is_taken_in_by_pieces() -> None:
    """Every call of it is timed, until all is in."""
    assert len(snapshot_pauses_ms(loaded_scheduler(2, BLOCKS), 10_000)) > 4


def test_memory_and_pauses_are_measured() -> None:
    """The figures of the large run come out of a small one too."""
    figures = in_child(100_000)
    assert 20 < figures["bytes_per_block"] < 1000
    assert 0 < figures["pause_p999_ms"] <= figures["max_pause_ms"]
