"""Why each request went where it did, and what came of it: the records behind `explain`.

Keeps the last `capacity` requests. A record holds the candidates that the decision saw, in the columns they were computed in
(rows are made only when somebody asks), the choice or the rejection, and what events then told of the attempt: when its
prefill began and ended, how much was really reused, the true time to first token. It only watches; nothing is decided by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from conductor.core.commands import Command, Reject, ResumeRequest, StartDecode
from conductor.core.events import (
    Event,
    FirstToken,
    HandoverFinished,
    PrefillFinished,
    PrefillStarted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from conductor.core.placement import Choice
from conductor.core.ttft import Candidates
from conductor.core.types import Candidate, Decision, Holder, Placement, Rejection, Request, RequestId, ReusePlan, TTFTEstimate


@dataclass(slots=True)
class Actual:
    """What really happened to one attempt. Times are seconds since the request arrived, but for `fetch_s` and
    `prefill_compute_s`, which are durations; None: not (yet) heard of."""

    fetch_s: float | None = None
    prefill_started_s: float | None = None
    prefill_finished_s: float | None = None
    prefill_compute_s: float | None = None
    reused_tokens: int | None = None
    decode: str | None = None
    handover_finished_s: float | None = None
    handover_bytes: int | None = None
    ttft_s: float | None = None
    finished_s: float | None = None
    output_tokens: int | None = None
    outcome: str | None = None
    message: str | None = None


@dataclass(slots=True)
class Record:
    """One attempt of one request. `waited_s` is how long it had waited when it was decided."""

    request: Request
    arrived_s: float
    decided_s: float
    decision: Decision
    candidates: Candidates | None
    row: int | None
    actual: Actual


class DecisionLog:
    def __init__(self, capacity: int, policy: str, admission: str) -> None:
        self._capacity = capacity
        self._rules = {"policy": policy, "admission": admission}
        self._records: dict[RequestId, list[Record]] = {}

    def decided(self, request: Request, arrived_s: float, choice: Choice | None, decision: Decision, now: float) -> None:
        """Remember a decision. The choice's columns are kept, so whoever made them must not write to them afterwards."""
        if self._capacity == 0:
            return
        table, row = (None, None) if choice is None else (choice.candidates, choice.row)
        actual = Actual(outcome="rejected") if isinstance(decision, Rejection) else Actual(decode=decision.decode)
        attempts = self._records.pop(request.id, []) if request.attempt > 1 else []
        self._records.pop(request.id, None)
        self._records[request.id] = [*attempts, Record(request, arrived_s, now, decision, table, row, actual)]
        if len(self._records) > self._capacity:
            del self._records[next(iter(self._records))]

    def observe(self, event: Event, commands: Iterable[Command], now: float) -> None:
        """Add what an event, and the commands that answered it, tell of a known request."""
        told = _TOLD.get(type(event))
        if told is not None:
            self._note(event, told, now)
        for command in commands:
            answered = _ANSWERED.get(type(command))
            if answered is not None:
                self._note(command, answered, now)

    def explain(self, request_id: RequestId) -> dict[str, Any] | None:
        """The record of a request as JSON values: of its last attempt, with the earlier ones below it."""
        attempts = self._records.get(request_id)
        if attempts is None:
            return None
        described = self._rules | _described(attempts[-1])
        if len(attempts) > 1:
            described["earlier_attempts"] = [_described(record) for record in attempts[:-1]]
        return described

    def recent(self, limit: int) -> list[Sequence[Record]]:
        """The attempts of the requests decided last, the newest request first."""
        return list(islice(reversed(self._records.values()), limit))

    def _note(self, told: Any, fill: Any, now: float) -> None:
        rejection = getattr(told, "rejection", None)
        attempts = self._records.get(told.request_id if rejection is None else rejection.request_id)
        if not attempts:
            return
        record = attempts[-1]
        attempt = getattr(told, "attempt", record.request.attempt)
        if attempt == record.request.attempt:
            fill(record.actual, told, now - record.arrived_s)


def _prefill_started(actual: Actual, event: PrefillStarted, since_s: float) -> None:
    actual.prefill_started_s, actual.fetch_s = since_s, event.fetch_s


def _prefill_finished(actual: Actual, event: PrefillFinished, since_s: float) -> None:
    actual.prefill_finished_s, actual.prefill_compute_s = since_s, event.compute_s
    actual.reused_tokens = event.reused_tokens


def _handover_finished(actual: Actual, event: HandoverFinished, since_s: float) -> None:
    actual.handover_finished_s, actual.handover_bytes = since_s, event.transfer_bytes


def _first_token(actual: Actual, event: FirstToken, since_s: float) -> None:
    actual.ttft_s = since_s


def _finished(actual: Actual, event: RequestFinished, since_s: float) -> None:
    actual.finished_s, actual.output_tokens, actual.outcome = since_s, event.output_tokens, event.reason.value


def _failed(actual: Actual, event: RequestFailed, since_s: float) -> None:
    actual.message = event.message


def _cancelled(actual: Actual, event: RequestCancelled, since_s: float) -> None:
    if actual.outcome is None:
        actual.finished_s, actual.outcome = since_s, "cancelled"


def _decode_chosen(actual: Actual, command: StartDecode, since_s: float) -> None:
    actual.decode = command.worker_id


def _interrupted(actual: Actual, command: ResumeRequest, since_s: float) -> None:
    actual.finished_s, actual.outcome = since_s, "interrupted"


def _rejected(actual: Actual, command: Reject, since_s: float) -> None:
    """A request that was placed and is refused all the same; one refused on arrival says so from the start."""
    if actual.outcome is None:
        actual.finished_s, actual.outcome, actual.message = since_s, "rejected_late", command.rejection.message


_TOLD: Mapping[type, Any] = {
    PrefillStarted: _prefill_started,
    PrefillFinished: _prefill_finished,
    HandoverFinished: _handover_finished,
    FirstToken: _first_token,
    RequestFinished: _finished,
    RequestFailed: _failed,
    RequestCancelled: _cancelled,
}
_ANSWERED: Mapping[type, Any] = {StartDecode: _decode_chosen, ResumeRequest: _interrupted, Reject: _rejected}


def _described(record: Record) -> dict[str, Any]:
    request, decision = record.request, record.decision
    waited_s = record.decided_s - record.arrived_s
    described: dict[str, Any] = {
        "request_id": request.id,
        "attempt": request.attempt,
        "prompt_tokens": request.prompt_tokens,
        "priority": request.priority.name.lower(),
        "traffic_class": request.traffic_class,
        "tenant": request.tenant,
        "arrived_s": record.arrived_s,
        "waited_s": waited_s,
        "decision": "placed" if isinstance(decision, Placement) else "rejected",
    }
    if isinstance(decision, Placement):
        described |= {"prefill": decision.prefill, "decode": decision.decode, "tbt_s": _number(decision.tbt_s)}
        described["ttft"] = _ttft(decision.ttft)
        described["reuse"] = _reuse(decision.reuse)
    else:
        described["rejection"] = _rejection(decision)
    if record.candidates is not None:
        chosen = record.candidates.ids[record.row] if record.row is not None else None
        described["candidates"] = [_candidate(row, chosen) for row in record.candidates.rows(waited_s)]
        if record.candidates.trust is not None:
            for row, trust in zip(described["candidates"], record.candidates.trust.tolist(), strict=True):
                row["trust"] = trust
        if record.candidates.relay is not None and isinstance(decision, Placement):
            described["relay"] = {name: _number(value) for name, value in asdict(record.candidates.relay).items()}
        plans = record.candidates.plans
        if plans.pull_tokens is not None and plans.pull_s is not None:
            pulls = zip(plans.pull_tokens.tolist(), plans.pull_s.tolist(), strict=True)
            for row, (tokens, seconds) in zip(described["candidates"], pulls, strict=True):
                row |= {"pull_tokens": int(tokens), "pull_s": _number(seconds)}
    described["actual"] = {name: _number(getattr(record.actual, name)) for name in Actual.__dataclass_fields__}
    return described


def _candidate(candidate: Candidate, chosen: str | None) -> dict[str, Any]:
    score = {"worker": candidate.worker, "chosen": candidate.worker == chosen, "score": _number(candidate.score)}
    return score | _ttft(candidate.ttft) | _reuse(candidate.reuse)


def _ttft(estimate: TTFTEstimate) -> dict[str, Any]:
    return {
        "total_s": _number(estimate.total_s),
        "queue_s": _number(estimate.queue_s),
        "transfer_s": _number(estimate.transfer_s),
        "prefill_s": _number(estimate.prefill_s),
        "low_s": _number(estimate.low_s),
        "high_s": _number(estimate.high_s),
        "calibrated": estimate.calibrated,
    }


def _reuse(reuse: ReusePlan) -> dict[str, Any]:
    return {
        "local_tokens": reuse.local_tokens,
        "fetched_tokens": reuse.fetched_tokens,
        "source": None if reuse.source is None else _holder(reuse.source),
        "relay": reuse.relay,
    }


def _holder(holder: Holder) -> str:
    return f"{holder.owner}/{holder.tier.name.lower()}"


def _rejection(rejection: Rejection) -> dict[str, Any]:
    values = {name: getattr(rejection, name) for name in Rejection.__dataclass_fields__ if name != "request_id"}
    return {name: _number(value) for name, value in values.items()} | {"reason": rejection.reason.value}


def _number(value: Any) -> Any:
    """JSON has no infinity: what is unbounded is unknown."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
