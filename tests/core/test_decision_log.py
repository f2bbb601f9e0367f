"""Decision records: what a decision saw, what it chose, and what came of it."""

from __future__ import annotations

import json

import pytest

from conductor.core.config import SchedulerConfig
from conductor.core.events import RequestCancelled, RequestFailed, RequestResumed, WorkerLost
from tests.core.builders import Drive, blocks, cluster, drive, request

POLICIES = ["conductor", "dynamo_cost", "kvcache_centric", "least_loaded", "local_cache_aware", "random", "round_robin"]


def test_a_record_tells_every_candidate_with_its_terms(scheduler: Drive) -> None:
    """The holder of the prefix is the cheaper of two, and says why."""
    scheduler.store("p1", blocks(10, shared=10))
    scheduler.place(request(shared=10))
    record = scheduler.scheduler.decision_record("r1")
    assert record is not None
    rows = {row["worker"]: row for row in record["candidates"]}
    assert (rows["p0"]["chosen"], rows["p1"]["chosen"]) == (False, True)
    assert (rows["p0"]["local_tokens"], rows["p1"]["local_tokens"]) == (0, 9 * 64)
    assert rows["p0"]["prefill_s"] == pytest.approx(0.01 + 640 * 1e-4)
    assert rows["p1"]["total_s"] == pytest.approx(0.01 + 64 * 1e-4)
    assert (record["decision"], record["prefill"]) == ("placed", "p1")


def test_a_record_tells_what_really_happened(scheduler: Drive) -> None:
    """Times count from the arrival of the request."""
    placed = scheduler.place(request(), at=5.0)
    scheduler.prefilled(placed, 0.2, reused=0)
    scheduler.decoded(placed, output_tokens=11, step_s=0.01)
    record = scheduler.scheduler.decision_record("r1")
    assert record is not None
    actual = record["actual"]
    assert pytest.approx((actual["prefill_started_s"], actual["ttft_s"], actual["prefill_compute_s"])) == (0.0, 0.2, 0.2)
    assert (actual["reused_tokens"], actual["output_tokens"], actual["outcome"]) == (0, 11, "length")
    assert actual["finished_s"] == pytest.approx(0.3)


def test_a_record_tells_whose_request_it_was(scheduler: Drive) -> None:
    """Who asks for a decision is told nothing about anybody else's."""
    scheduler.place(request(tenant="team-a"))
    record = scheduler.scheduler.decision_record("r1")
    assert record is not None
    assert record["tenant"] == "team-a"


def test_a_refusal_is_recorded_with_its_numbers() -> None:
    """Nobody takes the request: the record says which reason was given."""
    driven = drive(joins=cluster(prefill=0))
    driven.arrive(request())
    record = driven.scheduler.decision_record("r1")
    assert record is not None
    assert (
        record["decision"],
        record["rejection"]["reason"],
        record["actual"]["outcome"],
    ) == ("rejected", "no_prefill_worker", "rejected")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_leaves_a_record_of_json_values(policy: str) -> None:
    """A record survives the trip through strict JSON."""
    driven = drive(SchedulerConfig(policy=policy))
    driven.store("p0", blocks(10, shared=10))
    driven.place(request(shared=10))
    record = driven.scheduler.decision_record("r1")
    assert record == json.loads(json.dumps(record, allow_nan=False))


def test_a_record_does_not_change_with_the_belief(scheduler: Drive) -> None:
    """What was seen stays as it was seen, whatever is learned afterwards."""
    placed = scheduler.place(request())
    before = scheduler.scheduler.decision_record("r1")
    scheduler.prefilled(placed, 5.0, reused=0)
    after = scheduler.scheduler.decision_record("r1")
    assert before is not None
    assert after is not None
    assert before["candidates"] == after["candidates"]


def test_only_the_last_records_are_kept() -> None:
    """The oldest goes when there is no room."""
    driven = drive(SchedulerConfig(policy="round_robin", decision_records=2))
    for name in ("r1", "r2", "r3"):
        driven.place(request(name))
    known = [name for name in ("r1", "r2", "r3") if driven.scheduler.decision_record(name)]
    assert known == ["r2", "r3"]


def test_no_records_are_kept_when_none_are_wanted() -> None:
    driven = drive(SchedulerConfig(policy="round_robin", decision_records=0))
    driven.place(request())
    assert driven.scheduler.decision_record("r1") is None


def test_an_interrupted_request_keeps_the_record_of_its_first_attempt(scheduler: Drive) -> None:
    """Both attempts can be told apart, and the first says how it ended."""
    placed = scheduler.place(request(), at=1.0)
    scheduler(WorkerLost(placed.prefill, 1), at=2.0)
    scheduler(RequestResumed(request(attempt=2)), at=3.0)
    record = scheduler.scheduler.decision_record("r1")
    assert record is not None
    (first,) = record["earlier_attempts"]
    assert (record["attempt"], first["attempt"]) == (2, 1)
    assert (first["actual"]["outcome"], first["actual"]["finished_s"]) == ("interrupted", 1.0)


def test_a_failure_tells_its_message(scheduler: Drive) -> None:
    placed = scheduler.place(request())
    scheduler(RequestFailed("r1", 1, placed.prefill, "out of blocks"))
    record = scheduler.scheduler.decision_record("r1")
    assert record is not None
    assert record["actual"]["message"] == "out of blocks"


def test_events_of_a_former_attempt_are_not_taken_for_the_present_one(scheduler: Drive) -> None:
    """A late report of attempt 1 leaves the record of attempt 2 alone."""
    first = scheduler.place(request(), at=1.0)
    scheduler(WorkerLost(first.prefill, 1), at=2.0)
    scheduler(RequestResumed(request(attempt=2)), at=3.0)
    scheduler.prefilled(first, 0.1)
    record = scheduler.scheduler.decision_record("r1")
    assert record is not None
    assert record["actual"]["prefill_finished_s"] is None


def test_a_cancelled_request_says_so(scheduler: Drive) -> None:
    scheduler.place(request(), at=1.0)
    scheduler(RequestCancelled("r1"), at=1.5)
    record = scheduler.scheduler.decision_record("r1")
    assert record is not None
    assert (record["actual"]["outcome"], record["actual"]["finished_s"]) == ("cancelled", 0.5)


def test_an_unknown_request_has_no_record(scheduler: Drive) -> None:
    assert scheduler.scheduler.decision_record("r404") is None
