"""What the core does at its edges: nobody to place on, waits that end, reports that say nothing, and bad configuration."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest

from conductor.core.commands import Cancel, ResumeRequest, StartDecode
from conductor.core.config import QueueConfig, SchedulerConfig
from conductor.core.events import (
    Event,
    FirstToken,
    HandoverFinished,
    PrefillFinished,
    PrefillStarted,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    Tick,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from conductor.core.messages import GenerationJob, SamplingParams
from conductor.core.policies import POLICIES, policy_named
from conductor.core.prefix_index import PrefixIndex
from conductor.core.scheduler import Scheduler
from conductor.core.types import SLO, FinishReason, Holder, RejectReason, Role, Tier
from conductor.core.worker_table import MAX_MODELS
from tests.core.builders import (
    AT_ONCE,
    BLOCK_TOKENS,
    PROFILE,
    Drive,
    blocks,
    cluster,
    drive,
    placements,
    refused,
    request,
    worker,
)

OPEN = replace(AT_ONCE, admission="on_prefill_done")


# nobody to place on


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("missing", [Role.PREFILL, Role.DECODE])
def test_a_model_that_no_worker_serves_is_refused(policy: str, missing: Role) -> None:
    """Whichever half of a placement is missing, no policy makes one up."""
    joins = [
        WorkerJoined(worker(name, role, model="other" if role is missing else "wanted"), 1)
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE))
    ]
    driven = drive(replace(AT_ONCE, policy=policy), joins)
    assert len(refused(driven.arrive(request("r1", model="wanted")))) == 1


@pytest.mark.parametrize(("gone", "reason"), [("p0", RejectReason.NO_PREFILL), ("d0", RejectReason.NO_DECODE)])
@pytest.mark.parametrize("late_binding", [True, False])
def test_a_cluster_without_a_pool_says_which(gone: str, reason: RejectReason, late_binding: bool) -> None:
    """The refusal names the pool that is missing, on arrival."""
    driven = drive(replace(AT_ONCE, late_binding=late_binding), cluster(1, 1))
    driven(WorkerLost(gone, 1))
    assert refused(driven.arrive(request("r1"))) == [reason]


def test_a_full_decode_pool_is_named_as_not_fitting_and_still_used() -> None:
    """Capacity is a prediction: a request that fits nowhere goes to the least reserved worker."""
    driven = drive(AT_ONCE, cluster(1, 2, capacity_blocks={Tier.DEVICE: 20}))
    placed = [driven.place(request(f"r{number}", tokens=1200)) for number in range(4)]
    assert sorted(str(one.decode) for one in placed) == ["d0", "d0", "d1", "d1"]


def test_a_line_that_is_full_refuses() -> None:
    """`max_requests` bounds those who wait, not those who run."""
    config = SchedulerConfig(policy="conductor", queue=QueueConfig(max_requests=1))
    driven = drive(config, cluster(1, 1))
    driven.settle(RequestArrived(request("r1", tokens=6400)))
    assert refused(driven.arrive(request("r2"), request("r3"))) == [RejectReason.QUEUE_FULL]


def test_a_request_that_nobody_can_take_yet_keeps_its_place_in_line() -> None:
    """Objectives or not, it is placed as soon as workers of its model are there."""
    config = SchedulerConfig(policy="conductor", slo=SLO(ttft_s=1.0))
    driven = drive(
        config, [WorkerJoined(worker(f"{role[0]}0", role, model="other"), 1) for role in (Role.PREFILL, Role.DECODE)]
    )
    assert driven.settle(RequestArrived(request("r1", model="wanted"))) == []
    joins = [WorkerJoined(worker(f"{role[0]}1", role, model="wanted"), 1) for role in (Role.PREFILL, Role.DECODE)]
    assert [(one.prefill, one.decode) for one in placements(driven(*joins))] == [("p1", "d1")]


def test_a_random_draw_keeps_a_coupled_engine_together() -> None:
    """The decode worker drawn is the one that prefills."""
    driven = drive(replace(AT_ONCE, policy="random"), [WorkerJoined(worker("c0", Role.COUPLED), 1), *cluster(0, 2)])
    assert {(one.prefill, one.decode) for one in placements(driven.arrive(*(request(f"r{n}") for n in range(9))))} == {
        ("c0", "c0")
    }


def test_short_prompts_of_one_wait_share_an_engine_step() -> None:
    """A worker that packs prompts gets several at once while others wait."""
    profile = replace(PROFILE, chunk_tokens=4096, packs_prompts=True)
    driven = drive(SchedulerConfig(policy="conductor"), cluster(1, 1, profile=profile))
    driven(*(RequestArrived(request(f"r{number}", tokens=300)) for number in range(8)))
    assert len(placements(driven.settle())) > 1


# a decode worker that is chosen late


def test_the_decode_worker_is_chosen_when_the_prompt_is_computed() -> None:
    """Admission `on_prefill_done` leaves it open until then."""
    driven = drive(OPEN)
    placed = driven.place(request("r1"))
    assert placed.decode is None
    assert driven.prefilled(placed, 0.07) == [StartDecode("r1", 1, "d0")]


@pytest.mark.parametrize("news", [WorkerDraining("d0"), WorkerLost("d0", 1)])
def test_a_prompt_that_finds_no_decode_worker_is_interrupted(news: Event) -> None:
    """Its prefill worker is told to let go, and the continuation waits."""
    driven = drive(OPEN, cluster(1, 1))
    placed = driven.place(request("r1"))
    driven(news)
    assert driven.prefilled(placed, 0.07) == [Cancel("r1", 1, ("p0",)), ResumeRequest("r1", 1)]


def test_a_handover_before_its_decode_worker_is_chosen_does_no_harm() -> None:
    """Events that overtake each other are no broken invariant."""
    driven = drive(OPEN)
    placed = driven.place(request("r1"))
    assert driven(HandoverFinished("r1", 1, 1, 0.1), PrefillFinished("r1", 1, placed.prefill, 0, 0.07)) == []


# reports


def test_a_prefill_that_took_no_time_is_no_evidence() -> None:
    """A clock that is too coarse must not teach that work is free."""
    driven = drive(AT_ONCE)
    placed = driven.place(request("r1"))
    driven.prefilled(placed, 0.0)
    assert driven.place(request("r2")).ttft.prefill_s == PROFILE.prefill_s(640, 0)


def test_a_prefill_told_by_another_worker_changes_nothing() -> None:
    """The request still counts on the worker that it was placed on."""
    driven = drive(AT_ONCE)
    placed = driven.place(request("r1"))
    other = "p1" if placed.prefill == "p0" else "p0"
    driven(PrefillFinished("r1", 1, other, 0, 0.07))
    assert driven.scheduler._view.prefill._work[placed.prefill].keys() == {"r1"}


def test_node_tiers_live_as_long_as_any_worker_of_the_node() -> None:
    """One of two workers of a host goes; what the host holds stays known, until the other one goes."""
    index = PrefixIndex()
    driven = Drive(Scheduler(AT_ONCE, index=index))
    tiers = {Tier.DEVICE: 100, Tier.HOST: 100}
    driven(*(WorkerJoined(worker(name, Role.PREFILL, node="n0", capacity_blocks=tiers), 1) for name in ("p0", "p1")))
    driven.store("p1", blocks(3), Tier.HOST)
    driven(WorkerLost("p0", 1))
    assert index.holders(blocks(3)[2]) == (Holder("n0", Tier.HOST),)
    driven(WorkerLost("p1", 1))
    assert index.holders(blocks(3)[2]) == ()


def test_what_is_told_of_unknown_requests_and_workers_changes_nothing() -> None:
    """Late news of what has long ended."""
    driven = drive(AT_ONCE)
    finished = RequestFinished("r9", 1, 5, FinishReason.STOP)
    late = (FirstToken("r9", 1), finished, RequestCancelled("r9"), RequestFailed("r9", 1, "p0", "gone"), WorkerDraining("p9"))
    assert driven(*late, PrefillStarted("r9", 1, "p0"), HandoverFinished("r9", 1, 1, 0.1), WorkerLost("p0", 0)) == []
    assert driven.place(request("r1")).prefill == "p0"


def test_an_arrival_told_twice_is_one_request() -> None:
    """The second telling is ignored while the first is in flight."""
    driven = drive(AT_ONCE)
    assert len(placements(driven.arrive(request("r1"), request("r1")))) == 1


def test_a_request_that_decodes_ends_well_without_the_worker_that_prefilled_it() -> None:
    """Nothing of it is left there, so nothing needs to be given back."""
    driven = drive(AT_ONCE)
    placed = driven.place(request("r1"))
    driven.prefilled(placed, 0.07)
    driven(HandoverFinished("r1", 1, 1, 0.01), WorkerLost(placed.prefill, 1))
    assert driven(RequestFinished("r1", 1, 5, FinishReason.STOP)) == []
    assert not driven.scheduler._view.decode.reserved_blocks.any()


def test_a_request_whose_work_was_reported_done_may_still_fail() -> None:
    """Work that is given back is not given back twice."""
    driven = drive(AT_ONCE)
    placed = driven.place(request("r1"))
    driven.prefilled(placed, 0.07)
    assert driven(RequestCancelled("r1")) == [Cancel("r1", 1, (placed.prefill, str(placed.decode)))]


def test_workers_of_different_profiles_are_calibrated_apart() -> None:
    """What one kind of worker has shown says nothing of another."""
    other = replace(PROFILE, prefill_base_s=0.02)
    joins = [*cluster(1, 1), WorkerJoined(worker("q0", Role.PREFILL, profile=other), 1)]
    driven = drive(replace(AT_ONCE, policy="round_robin"), joins)
    for number in range(12):
        placed = driven.place(request(f"r{number}"))
        driven.prefilled(placed, PROFILE.prefill_s(640, 0) if placed.prefill == "p0" else 5.0)
    calibrated = {placed.prefill: placed.ttft.calibrated for placed in (driven.place(request(f"s{n}")) for n in range(2))}
    assert calibrated == {"p0": True, "q0": False}


def test_handover_counts_for_those_workers_alone_whose_first_token_waits_for_it() -> None:
    """In a mixed pool each worker's estimate is its own."""
    waits = replace(PROFILE, first_token_after_handover=True, handover_overlaps_prefill=False)
    joins = [*cluster(1, 1), WorkerJoined(worker("q0", Role.PREFILL, profile=waits), 1)]
    driven = drive(replace(AT_ONCE, policy="round_robin"), joins)
    handover_s = {placed.prefill: placed.ttft.handover_s for placed in (driven.place(request(f"r{n}")) for n in range(2))}
    assert handover_s["p0"] == 0.0 < handover_s["q0"]


# the index


def test_many_holders_of_one_prefix_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More holders than are worth a look at each; what is remembered of them, and of roots, stays within bounds."""
    monkeypatch.setattr("conductor.core.prefix_index.CACHED", 2)
    index = PrefixIndex()
    holders = [Holder(f"w{number:02d}", Tier.DEVICE) for number in range(20)]
    for holder in holders:
        index.add(holder)
    for family in range(6):
        chain = blocks(10, name=family + 10)
        for number, holder in enumerate(holders):
            index.store(holder, None, chain[: 3 if number % (family + 2) else 10])
        depths = index.match(chain).depths
        assert [int(depths[index.slot(holder)]) for holder in holders] == [
            3 if number % (family + 2) else 10 for number in range(20)
        ]
        assert index.match(chain[:5]).depths.max() == 5


def test_removing_what_was_never_there_changes_nothing() -> None:
    """Of a known block that another holder has, and of an unknown one."""
    index = PrefixIndex()
    first, second = Holder("w0", Tier.DEVICE), Holder("w1", Tier.DEVICE)
    index.add(first)
    index.add(second)
    index.store(first, None, blocks(2))
    index.remove(second, (*blocks(2), 99))
    index.check()
    assert (index.num_claims(first), index.num_claims(second)) == (2, 0)


def test_one_of_two_who_expect_the_same_blocks_may_give_up() -> None:
    """The other one still expects them."""
    index = PrefixIndex()
    holder = Holder("w0", Tier.DEVICE)
    slot = index.add(holder)
    for _ in range(2):
        index.expect(holder, blocks(3), 10.0)
    index.unexpect(holder, blocks(3))
    assert index.match(blocks(3)).depths[slot] == 3
    index.unexpect(holder, blocks(3))
    index.unexpect(holder, blocks(3))
    index.check()
    assert index.match(blocks(3)).depths[slot] == 0


# values and configuration


def test_jobs_cross_processes_unchanged() -> None:
    """What travels beside the scheduler's own values survives the trip."""
    job = GenerationJob(request("r1"), b"\0" * 4 * BLOCK_TOKENS, SamplingParams(max_tokens=5, temperature=0.5), "gateway-1")
    assert pickle.loads(pickle.dumps(job)) == job


def test_tenants_share_prefixes_within_a_group_alone() -> None:
    """A group cannot be spelt by a tenant's name."""
    alone, first = request("r1", tenant="a"), request("r2", tenant="a", sharing_group="g")
    second = request("r3", tenant="b", sharing_group="g")
    assert first.cache_domain == second.cache_domain
    assert alone.cache_domain not in (first.cache_domain, request("r4", tenant="g").cache_domain)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_tokens": 0}, "block_tokens is 0; it must be an integer of at least 1"),
        ({"admission": "maybe"}, "admission is 'maybe'; it must be one of none, on_prefill_done, early, predictive"),
        ({"kvcache_balancing_threshold": 0.5}, "kvcache_balancing_threshold is 0.5; it must be at least 1"),
        ({"relayed_reads": "always"}, "relayed_reads is 'always'; it must be one of never, other_host, other_worker"),
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"decision_records": -1}, "decision_records is -1"),
        ({"queue": QueueConfig(aging=0.0)}, "queue.aging is 0.0; it must be more than 0"),
    ],
)
def test_bad_configuration_names_field_value_and_what_is_allowed(changes: dict[str, object], words: str) -> None:
    """Each with the words that an operator needs."""
    with pytest.raises(ValueError, match=words):
        replace(SchedulerConfig(), **changes)  # type: ignore[arg-type]


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    """The names are listed."""
    with pytest.raises(ValueError, match="policy is 'best'; it must be one of conductor, "):
        policy_named("best")


def test_time_before_the_first_event_does_not_exist() -> None:
    """A scheduler that has been told nothing waits for nothing."""
    scheduler = Scheduler()
    assert scheduler.next_deadline() is None
    assert scheduler.handle(Tick(), -math.inf) == []
    scheduler.check()


def test_a_prompt_that_only_the_largest_worker_holds_is_not_too_long() -> None:
    """It is refused when it exceeds the largest of a pool, not the least."""
    small = {Tier.DEVICE: 5}
    joins = [*cluster(1, 1), WorkerJoined(worker("p1", Role.PREFILL, capacity_blocks=small), 1)]
    assert placements(drive(joins=joins).settle(RequestArrived(request("r1"))))


def test_any_number_of_models_may_be_asked_for() -> None:
    """Whom each is served by is right for all of them, however many are kept at hand."""
    driven = drive(joins=cluster(2, 1, model="m"))
    pool = driven.scheduler._view.prefill
    for number in range(2 * MAX_MODELS):
        assert pool.serving(f"model-{number}").tolist() == [False, False]
        assert pool.serving("m").tolist() == [True, True]
    assert len(pool._serving) <= MAX_MODELS


def test_claims_on_a_node_s_memory_outlive_one_of_its_two_workers() -> None:
    """As long as the other reports it too; what only the lost one had is gone."""
    driven = drive(joins=[WorkerJoined(worker(name, Role.PREFILL, node="n1"), 1) for name in ("p0", "p1")])
    for name in ("p0", "p1"):
        driven.store(name, blocks(4), Tier.HOST)
        driven.store(name, blocks(4))
    driven(WorkerLost("p0", 1))
    assert driven.scheduler._index.holders(blocks(4)[3]) == (Holder("p1", Tier.DEVICE), Holder("n1", Tier.HOST))


def test_a_request_that_overtakes_another_on_its_worker_leaves_the_queue_as_long_as_it_is() -> None:
    """The worker began with the second; the sum over both is what the next has to wait for."""
    driven = drive(joins=cluster(1, 1))
    for name in ("r1", "r2"):
        driven.place(request(name, tokens=6400))
    driven(PrefillStarted("r2", 1, "p0"), at=0.1)
    assert driven.place(request("r3")).ttft.queue_s == pytest.approx(2 * 0.65 - 0.1)


def test_what_was_never_reserved_cannot_be_given_back() -> None:
    pool = drive(joins=cluster(1, 1)).scheduler._view.decode
    pool.release("d0", "r9")
    pool.check()
    assert pool.reserved_blocks.tolist() == [0.0]
