"""Faults of balance and of stale indexes that users of other schedulers reported, each shown not to be ours.

Each docstring names the threads; `conductor/DESIGN.md` lists them all.
"""

from __future__ import annotations

from collections import Counter

import pytest

from conductor.core.commands import RequestSnapshot
from conductor.core.config import SchedulerConfig
from conductor.core.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    IndexSnapshot,
    LoadReported,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from conductor.core.prefix_index import PrefixIndex
from conductor.core.scheduler import Scheduler
from conductor.core.types import Holder, Role, Stamp, Tier, WorkerLoad
from tests.core.builders import BLOCK_TOKENS, Drive, blocks, cluster, drive, placements, request, worker

OURS = SchedulerConfig(policy="conductor", late_binding=False)
BALANCED = ("conductor", "local_cache_aware", "least_loaded", "kvcache_centric")


def config(policy: str) -> SchedulerConfig:
    return SchedulerConfig(policy=policy, late_binding=False)


def prefills(driven: Drive, count: int, first: int = 0, **changes: int) -> Counter[str]:
    """Where a burst of requests prefills."""
    burst = [request(f"r{number}", **changes) for number in range(first, first + count)]
    return Counter(placed.prefill for placed in placements(driven.arrive(*burst)))


# balance


@pytest.mark.parametrize("policy", ["conductor", "local_cache_aware", "kvcache_centric"])
def test_a_shared_system_prompt_does_not_send_everybody_to_its_holder(policy: str) -> None:
    """dynamo #737: everything with one system prompt went to one of eight instances."""
    driven = drive(config(policy), cluster(8, 8))
    driven.store("p0", blocks(4, shared=4))
    spread = prefills(driven, 64, tokens=2048, shared=4)
    assert len(spread) == 8
    assert max(spread.values()) <= 2 * 64 / 8


@pytest.mark.parametrize("policy", BALANCED)
def test_decisions_between_two_load_reports_see_each_other(policy: str) -> None:
    """dynamo #589: all decisions inside one metrics interval picked the same best worker."""
    assert set(prefills(drive(config(policy), cluster(4, 4)), 40).values()) == {10}


def test_single_turn_load_starves_no_decode_worker() -> None:
    """dynamo #7836: two of five decode workers got nothing."""
    driven = drive(OURS, cluster(2, 5))
    placed = placements(driven.arrive(*(request(f"r{number}") for number in range(50))))
    assert {10} == set(Counter(one.decode for one in placed).values())


def test_work_waits_on_no_worker_while_others_have_none() -> None:
    """dynamo #12864: 83 requests waited on one prefill worker and none on two others, which were cold."""
    driven = drive(OURS, cluster(3, 3))
    driven.store("p0", blocks(30, shared=30))
    placed = placements(driven.arrive(*(request(f"r{number}", tokens=2048, shared=30) for number in range(90))))
    work_s = Counter[str]()
    for one in placed:
        work_s[one.prefill] += round(1e6 * (one.ttft.prefill_s + one.ttft.transfer_s))
    longest_s = max(1e6 * (one.ttft.prefill_s + one.ttft.transfer_s) for one in placed)
    assert max(work_s.values()) - min(work_s[name] for name in ("p0", "p1", "p2")) <= 2 * longest_s


def test_requests_already_decoding_count_in_the_choice_of_a_decode_worker() -> None:
    """dynamo #12300: active requests were not counted."""
    driven = drive(OURS, cluster(1, 2))
    first = driven.place(request("r1", tokens=6400))
    driven.prefilled(first, 0.1)
    assert driven.place(request("r2")).decode != first.decode
    assert driven.place(request("r3")).decode != first.decode, "a long context weighs more than one short request"


def test_paced_cold_requests_use_every_worker() -> None:
    """Infera #103: with paced requests every load is zero, and 448 of 448 went to one of two workers."""
    driven = drive(OURS, cluster(2, 2))
    seen = Counter[str]()
    for number in range(40):
        placed = driven.place(request(f"r{number}"), at=float(number))
        driven.prefilled(placed, 0.07)
        driven.decoded(placed, 10, 0.01)
        driven.store(placed.prefill, request(f"r{number}").block_hashes)
        seen[placed.prefill] += 1
    assert min(seen["p0"], seen["p1"]) >= 15


def test_a_cache_miss_does_not_prefer_the_emptiest_cache_to_the_shortest_queue() -> None:
    """sglang #14532: the smallest tree won whatever its load, and died of it."""
    driven = drive(OURS)
    driven.store("p1", blocks(100, name=50))
    driven(LoadReported("p0", 1, WorkerLoad(running_prefill_remaining_s=5.0)))
    assert driven.place(request()).prefill == "p1"


@pytest.mark.parametrize("policy", BALANCED)
def test_dispatched_work_counts_before_the_worker_says_a_word(policy: str) -> None:
    """sglang #15473, smg #1714: load was never updated, or only once the stream had opened."""
    driven = drive(config(policy))
    first = driven.place(request("r1", tokens=12_800), at=0.0)
    others = {driven.place(request(f"r{number}"), at=0.5).prefill for number in (2, 3, 4)}
    assert first.prefill not in others


def test_an_overdue_prefill_does_not_make_its_worker_look_idle() -> None:
    """smg #1714: a slow prefill looked idle. Here it has taken twice its time, and a cold request comes."""
    driven = drive(OURS)
    slow = driven.place(request("r1", tokens=12_800), at=0.0)
    assert driven.place(request("r2"), at=2.7).prefill != slow.prefill


def test_one_busy_worker_costs_the_others_no_affinity() -> None:
    """sglang #32195: under imbalance all affinity was thrown away, and hits collapsed."""
    driven = drive(OURS, cluster(3, 3))
    for number in range(2):
        driven.store(f"p{number}", request(f"r{number}").block_hashes)
    driven(LoadReported("p2", 1, WorkerLoad(running_prefill_remaining_s=60.0)))
    assert [driven.place(request(f"r{number}", tokens=700, own=number)).prefill for number in range(2)] == ["p0", "p1"]


def test_a_hot_prefix_does_not_queue_on_its_only_holder() -> None:
    """production-stack #1035: others fetch it instead of waiting, or of computing it again."""
    driven = drive(OURS)
    driven.store("p0", blocks(100, shared=100))
    driven(LoadReported("p0", 1, WorkerLoad(running_prefill_remaining_s=5.0)))
    placed = driven.place(request("r1", tokens=6500, shared=100))
    assert ("p1", Holder("p0", Tier.DEVICE), 6400) == (placed.prefill, placed.reuse.source, placed.reuse.fetched_tokens)


# the index


def test_children_of_an_unknown_parent_are_not_lost_for_ever() -> None:
    """llm-d-kv-cache #372: after a restart, children of unknown parents were dropped for good."""
    driven = drive(OURS)
    known = blocks(6)
    assert driven(BlocksStored(Stamp("p0", 1, 1), Tier.DEVICE, known[2], known[3:])) == [RequestSnapshot("p0", 1)]
    driven(IndexSnapshot(Stamp("p0", 1, 1), {Tier.DEVICE: known}))
    assert driven.place(request("r1", tokens=400, own=-9)).reuse.local_tokens == 6 * BLOCK_TOKENS


def test_a_gap_is_asked_about_until_it_is_answered() -> None:
    """dynamo #1056, #2756: nothing recovered from lost events, or a race lost the recovery."""
    driven = drive(OURS)
    driven.store("p0", blocks(4))
    missed = BlocksStored(Stamp("p0", 1, 3), Tier.DEVICE, blocks(6)[4], blocks(6)[5:])
    assert driven(missed) == [RequestSnapshot("p0", 1)]
    assert driven(missed) == [], "asked once at a time"
    due_s = driven.scheduler.next_deadline()
    assert due_s is not None
    assert driven(Tick(), at=due_s) == [RequestSnapshot("p0", 1)], "asked again"
    driven(IndexSnapshot(Stamp("p0", 1, 3), {Tier.DEVICE: blocks(6)}))
    assert driven.place(request("r1", tokens=400, own=-9)).reuse.local_tokens == 6 * BLOCK_TOKENS
    assert driven.scheduler.next_deadline() is None


def test_a_snapshot_older_than_what_was_seen_is_asked_for_again() -> None:
    """dynamo #11190: a cold restore raced with events that were newer than it."""
    driven = drive(OURS)
    driven(BlocksStored(Stamp("p0", 1, 5), Tier.DEVICE, None, blocks(2)))
    assert driven(IndexSnapshot(Stamp("p0", 1, 4), {Tier.DEVICE: ()})) == [RequestSnapshot("p0", 1)]


def test_nothing_is_fetched_from_a_worker_that_is_gone() -> None:
    """llm-d-router #1736, gateway-api #1289: entries of a removed worker stayed in the index (I8)."""
    driven = drive(OURS, cluster(3, 2))
    driven.store("p0", blocks(100, shared=100))
    driven(WorkerLost("p0", 1))
    placed = driven.place(request("r1", tokens=6500, shared=100))
    assert (placed.reuse.reused_tokens, placed.reuse.source) == (0, None)


def test_reports_of_a_dead_life_do_not_come_back() -> None:
    """llm-d-router #1736, with its reports, and news of an even older death, arriving late."""
    driven = drive(OURS)
    driven(WorkerJoined(worker("p0", Role.PREFILL), 3), WorkerLost("p0", 3), WorkerLost("p0", 1))
    driven(BlocksStored(Stamp("p0", 3, 1), Tier.DEVICE, None, blocks(4)), WorkerJoined(worker("p0", Role.PREFILL), 3))
    assert driven.place(request("r1", tokens=400, own=-9)).prefill == "p1"


def test_a_worker_that_comes_back_is_cold() -> None:
    """dynamo #14627: a warm restart kept what the former life had claimed."""
    driven = drive(OURS)
    driven.store("p0", blocks(6))
    driven(WorkerJoined(worker("p0", Role.PREFILL), 2))
    assert driven.place(request("r1", tokens=400, own=-9)).reuse.reused_tokens == 0


def test_a_cleared_cache_attracts_nobody() -> None:
    """aibrix #2287: AllBlocksCleared was ignored, and the reset worker still preferred."""
    driven = drive(OURS)
    driven.store("p1", blocks(6))
    driven(CacheCleared(Stamp("p1", 1, 2), Tier.DEVICE))
    placed = driven.place(request("r1", tokens=400, own=-9))
    assert (placed.prefill, placed.reuse.reused_tokens) == ("p0", 0)


def test_blocks_in_the_middle_of_a_prompt_are_no_prefix() -> None:
    """aibrix #917: a match that does not begin at the first block counted (I4)."""
    driven = drive(OURS)
    driven.store("p0", blocks(6)[2:])
    assert driven.place(request("r1", tokens=400, own=-9)).reuse.reused_tokens == 0


def test_a_prefix_outlives_its_device_copy_in_host_memory() -> None:
    """llm-d-router #1650, sglang #39108: dropped when the device copy went, though a host copy lived."""
    tiers = {Tier.DEVICE: 1000, Tier.HOST: 10_000}
    driven = drive(OURS, cluster(1, 1, capacity_blocks=tiers))
    known = blocks(100)
    driven.store("p0", known)
    driven.store("p0", known, Tier.HOST)
    driven(BlocksRemoved(Stamp("p0", 1, 3), Tier.DEVICE, known[::-1]))
    placed = driven.place(request("r1", tokens=6500, own=-9))
    assert (Holder("node-p0", Tier.HOST), 6400) == (placed.reuse.source, placed.reuse.reused_tokens)


@pytest.mark.parametrize("longest", ["p0", "p1"])
def test_the_longest_match_is_the_one_that_is_fetched(longest: str) -> None:
    """production-stack #1055: the first match was chosen, not the longest."""
    driven = drive(OURS, cluster(3, 1))
    known = blocks(100, shared=100)
    for name in ("p0", "p1"):
        driven.store(name, known if name == longest else known[:50])
        driven(LoadReported(name, 1, WorkerLoad(running_prefill_remaining_s=60.0)))
    placed = driven.place(request("r1", tokens=6500, shared=100))
    assert (placed.prefill, placed.reuse.source, placed.reuse.fetched_tokens) == ("p2", Holder(longest, Tier.DEVICE), 6400)


def test_a_fresh_scheduler_knows_the_caches_from_their_first_snapshot() -> None:
    """sglang #39750, Mooncake #1336: a new router was cache-blind, a restart lost everything."""
    driven = drive(OURS)
    assert driven(IndexSnapshot(Stamp("p1", 1, 57), {Tier.DEVICE: blocks(6)})) == []
    assert driven(BlocksStored(Stamp("p1", 1, 58), Tier.DEVICE, blocks(6)[5], (99,))) == [], "followed without a gap"
    assert driven.place(request("r1", tokens=400, own=-9)).prefill == "p1"


def test_expected_blocks_do_not_outlive_their_time() -> None:
    """dynamo #10774, vllm #57159: an index went on claiming what never came (I11). No tick is needed for it to end."""
    index = PrefixIndex()
    driven = Drive(Scheduler(OURS, index=index))
    driven(*cluster(1, 1))
    placed = driven.place(request("r1"))
    slot = index.slot(Holder("p0", Tier.DEVICE))
    assert index.match(request("r1").block_hashes).depths[slot] == 10
    driven.prefilled(placed, 0.07)
    driven(LoadReported("p0", 1, WorkerLoad()), at=1000.0)
    assert index.match(request("r1").block_hashes).depths[slot] == 0


def test_a_burst_of_one_conversation_counts_on_blocks_that_are_on_their_way() -> None:
    """dynamo #5565: no hit was ever seen. The second request sees what the first one is about to store."""
    driven = drive(OURS)
    first = driven.place(request("r1", tokens=6400, own=1))
    second = driven.place(request("r2", tokens=6500, own=1))
    assert (first.prefill, 6400) == (second.prefill, second.reuse.local_tokens)


@pytest.mark.parametrize("policy", ["conductor", "kvcache_centric"])
def test_nothing_is_fetched_before_its_holder_has_reported_it(policy: str) -> None:
    """vllm #57159: blocks were advertised that could not be fetched. Nor can those that are being computed."""
    driven = drive(config(policy))
    first = driven.place(request("r1", tokens=6400, own=1))
    driven(LoadReported(first.prefill, 1, WorkerLoad(running_prefill_remaining_s=60.0)))
    assert driven.place(request("r2", tokens=6500, own=1)).reuse.source is None
    driven.store(first.prefill, request("r1", tokens=6400, own=1).block_hashes)
    assert driven.place(request("r3", tokens=6600, own=1)).reuse.reused_tokens >= 6400


def test_reports_of_an_unknown_worker_change_nothing() -> None:
    """ray #58835: an unknown replica id was a KeyError, or stayed in the shared tree for ever."""
    driven = drive(OURS)
    stranger = Stamp("p9", 1, 1)
    events = (
        BlocksStored(stranger, Tier.DEVICE, None, blocks(6)),
        BlocksRemoved(stranger, Tier.DEVICE, blocks(6)),
        CacheCleared(stranger, Tier.HOST),
        IndexSnapshot(stranger, {Tier.DEVICE: blocks(6)}),
        LoadReported("p9", 1, WorkerLoad()),
        WorkerLost("p9", 1),
    )
    assert driven(*events) == []
    assert driven.place(request("r1", tokens=400, own=-9)).reuse.reused_tokens == 0
