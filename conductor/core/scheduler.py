"""The whole scheduling policy: give it events and the time, carry out the commands that it answers.

The scheduler owns the state and decides nothing itself: a policy chooses (`placement.py`), admission accepts or refuses
(`admission.py`), and what this module does is to keep the belief in step. No clock, no I/O, no randomness: equal events at
equal times give equal commands. Any order of events is accepted: what is late, repeated or about something unknown changes
nothing. Time that seems to go back counts as no time passing (I6).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from conductor.core import admission
from conductor.core import events as ev
from conductor.core.assessment import Assessor
from conductor.core.block_reports import BlockReports
from conductor.core.bookings import Bookings
from conductor.core.cluster_view import ClusterView
from conductor.core.commands import Cancel, Command, Reject, ResumeRequest, StartDecode, StartPrefill
from conductor.core.config import SchedulerConfig, require_fit
from conductor.core.continuations import Continuations
from conductor.core.decision_log import DecisionLog
from conductor.core.late_binding import LateBinding
from conductor.core.learning import Learning
from conductor.core.migration import Migration
from conductor.core.overview import Overview
from conductor.core.placement import Choice, Policy, Situation
from conductor.core.policies import policy_named
from conductor.core.policies.conductor import least_work_s
from conductor.core.prefix_index import PrefixIndex
from conductor.core.requests import Outcome, Phase, RequestState, RequestTable
from conductor.core.types import FinishReason, Rejection, RejectReason, Request, RequestId, Tier, WorkerId

FREEING = frozenset(
    (ev.PrefillFinished, ev.HandoverFinished, ev.RequestFailed, ev.RequestCancelled, ev.WorkerJoined, ev.WorkerLost)
)
"""Events after which a prefill worker may be free that was not before."""

CHANGING = frozenset((ev.WorkerJoined, ev.WorkerDraining, ev.WorkerLost))
"""Events after which other requests than before may find a worker."""

OUTCOMES = {
    FinishReason.STOP: Outcome.FINISHED,
    FinishReason.LENGTH: Outcome.FINISHED,
    FinishReason.CANCELLED: Outcome.CANCELLED,
    FinishReason.FAILED: Outcome.FAILED,
}


class Scheduler:
    """One per cluster. `policy` overrides the named one with a function of the same signature."""

    def __init__(
        self, config: SchedulerConfig | None = None, *, policy: Policy | None = None, index: PrefixIndex | None = None
    ) -> None:
        self.config = config or SchedulerConfig()
        self._policy = policy or policy_named(self.config.policy)
        self._index = index or PrefixIndex()
        self._view = ClusterView(self._index, self.config.relayed_reads)
        self._reports = BlockReports(self._index, self._view, self.config.snapshot_retry_s, self.config.snapshot_piece_blocks)
        self._learning = Learning(self.config.calibration, self._view)
        self._requests = RequestTable()
        self._log = DecisionLog(self.config.decision_records, self.config.policy, self.config.admission)
        self._continuations = Continuations(self.config)
        self._now = -math.inf
        self._migration = Migration(self.config.migration, self._view, self._index, self.config.block_tokens)
        self._books = Bookings(self._view, self._index)
        self._assessor = Assessor(self.config, self._index, self._view, self._learning.outputs, lambda: self._line)
        self._line = LateBinding(
            self.config.queue, self._view, self._policy, self._assessor.assess, self._assessor.may_be_taken
        )
        wanted = self.config.late_binding
        self._late_binding = self.config.policy == "conductor" if wanted is None else wanted
        self._handlers: dict[type, Callable[[Any, float], list[Command]]] = {
            ev.RequestArrived: self._handle_request_arrived,
            ev.RequestResumed: self._handle_request_resumed,
            ev.RequestCancelled: self._handle_request_cancelled,
            ev.WorkerJoined: self._handle_worker_joined,
            ev.WorkerLost: self._handle_worker_lost,
            ev.WorkerDraining: self._migration.departures.draining,
            ev.BlocksStored: self._reports.stored,
            ev.BlocksRemoved: self._reports.removed,
            ev.CacheCleared: self._reports.cleared,
            ev.IndexSnapshot: self._reports.snapshot,
            ev.LoadReported: self._view.load_reported,
            ev.PrefillStarted: self._handle_prefill_started,
            ev.PrefillFinished: self._handle_prefill_finished,
            ev.HandoverFinished: self._handle_handover_finished,
            ev.FirstToken: self._handle_first_token,
            ev.RequestFinished: self._handle_request_finished,
            ev.RequestFailed: self._handle_request_failed,
            ev.TransferFinished: self._migration.ended,
            ev.TransferFailed: self._migration.ended,
            ev.LinkMeasured: self._view.link_measured,
            ev.Tick: self._handle_tick,
        }

    def handle(self, event: ev.Event, now: float) -> list[Command]:
        """Take in one event and answer with what is to be done. Never raises on the order of events; raises ValueError for a
        worker that cannot belong to this cluster."""
        if now > self._now:
            self._now = now
        self._index.expire(self._now)
        if self._now >= self._view.storage.due_s:
            self._view.storage.expire(self._now)
        commands = self._handlers[type(event)](event, self._now)
        if len(self._line):
            if type(event) in CHANGING:
                self._line.workers_changed(self._now)
            if type(event) in FREEING:
                self._line.look_soon(self._now)
                commands = commands + self._dispatch(self._now)
        self._log.observe(event, commands, self._now)
        return commands

    def decision_record(self, request_id: RequestId) -> dict[str, Any] | None:
        """Why the request went where it did and what came of it, as JSON values; None when it is not known (any more)."""
        return self._log.explain(request_id)

    def unknown_caches(self) -> set[WorkerId]:
        """Workers of whose caches no snapshot has been taken in since they joined."""
        return self._reports.unknown()

    def worker_belief(self) -> dict[WorkerId, dict[str, Any]]:
        """What is believed of each worker, as JSON values."""
        described = self._view.describe(self._now, self._learning.trust)
        for worker, values in described.items():
            values["indexed_blocks"] = self._index.num_claims(self._view.holder(worker, Tier.DEVICE))
        return described

    def overview(self, now: float) -> dict[str, Any]:
        """The last decisions and what the last requests add up to, as JSON values."""
        return Overview(self.config, self._log, self._index, self._view).describe(now)

    def copies_in_flight(self) -> list[dict[str, Any]]:
        """The background copies under way and why each was thought worth its cost, as JSON values."""
        return self._migration.explain()

    def next_deadline(self) -> float | None:
        """When `handle(ev.Tick(), now)` is due at the latest; None when nothing waits for time to pass."""
        deadline = min(
            self._reports.next_deadline(),
            self._continuations.next_deadline(),
            self._line.next_deadline(),
            self._migration.next_deadline(),
        )
        return None if deadline == math.inf else deadline

    def check(self) -> None:
        """Raise `InvariantError` if the state contradicts itself. O(state)."""
        parts = (self._requests, self._line, self._continuations, self._view, self._reports, self._index)
        for part in (*parts, self._books.timeline, self._migration):
            part.check()

    # requests

    def _handle_request_arrived(self, event: ev.RequestArrived, now: float) -> list[Command]:
        if self._requests.get(event.request.id) is not None:
            return []
        state = self._take_up(event.request, now)
        return self._enqueue(state, now) if self._late_binding else self._decide(state, now)

    def _take_up(self, request: Request, now: float) -> RequestState:
        state = RequestState(request, arrived_s=now, phase_since_s=now)
        self._requests.add(state)
        return state

    def _handle_request_resumed(self, event: ev.RequestResumed, now: float) -> list[Command]:
        state = self._requests.get(event.request.id)
        if state is None:  # a Conductor before this one knew it, or it seemed finished but not all of its output came through
            return self._continue(self._take_up(event.request, now), now)
        if state.phase is not Phase.INTERRUPTED or event.request.attempt != state.request.attempt + 1:
            return []
        self._continuations.forget(event.request.id)
        state.request = event.request
        state.enter(Phase.WAITING, now)
        return self._continue(state, now)

    def _continue(self, state: RequestState, now: float) -> list[Command]:
        """Place an interrupted request again, or keep it for a worker that comes back."""
        if not self._assessor.may_be_taken(state):
            self._continuations.orphaned(state)
            return []
        self._continuations.forget(state.request.id)
        return self._decide(state, now)

    def _handle_request_cancelled(self, event: ev.RequestCancelled, now: float) -> list[Command]:
        state = self._requests.get(event.request_id)
        if state is None:
            return []
        workers = state.workers
        self._line.remove(event.request_id)
        self._continuations.forget(event.request_id)
        self._books.release(state, now)
        self._requests.end(event.request_id, Outcome.CANCELLED)
        return [Cancel(event.request_id, state.request.attempt, workers)] if workers else []

    def _enqueue(self, state: RequestState, now: float) -> list[Command]:
        if not self._assessor.anybody:
            return self._reject(state, self._assessor.nobody(state))
        if self._line.full:
            message = f"{len(self._line)} requests are waiting, as many as are allowed"
            waiting = len(self._line) * len(self._view.prefill)
            one_s = self._line.work_s / waiting if waiting else 1.0
            return self._reject(state, admission.refuse(state.request, RejectReason.QUEUE_FULL, message, one_s))
        if admission.may_refuse(state.request, self.config):
            hopeless = self._hopeless(state, now)
            if hopeless:
                return hopeless
        self._line.add(state, least_work_s(self._assessor.terms(state.request, now), self.config.allow_pull), now)
        return []

    def _hopeless(self, state: RequestState, now: float) -> list[Command]:
        """Refuse on arrival what would be refused when its turn comes, however short the wait until then."""
        situation = self._assessor.assess(state, now)
        choice = None if situation is None else self._policy(situation)
        if situation is None or choice is None:
            return []
        decision = admission.admit(situation, choice, self._books.timeline)
        return self._reject(state, decision, choice) if isinstance(decision, Rejection) else []

    def _dispatch(self, now: float) -> list[Command]:
        """Send out whoever's turn it is in the central line."""
        commands: list[Command] = []
        for turn in self._line.turns(now):
            commands += self._settle(turn.state, turn.situation, turn.choice, now)
        return commands

    def _decide(self, state: RequestState, now: float) -> list[Command]:
        situation = self._assessor.assess(state, now)
        choice = None if situation is None else self._policy(situation)
        if situation is None or choice is None:
            return self._reject(state, self._assessor.nobody(state))
        return self._settle(state, situation, choice, now)

    def _settle(self, state: RequestState, situation: Situation, choice: Choice, now: float) -> list[Command]:
        self._assessor.decisions += 1
        self._migration.observe(state.request.block_hashes, situation.terms.match, now)
        decision = admission.admit(situation, choice, self._books.timeline)
        if isinstance(decision, Rejection):
            return self._reject(state, decision, choice)
        self._log.decided(state.request, state.arrived_s, choice, decision, now)
        state.decode_s = situation.need.output_tokens * choice.decode.tbt_s
        state.claimed_tokens = situation.terms.claimed_tokens(choice.row)
        self._books.place(state, decision, situation.need, now)
        return [StartPrefill(decision)]

    def _reject(self, state: RequestState, rejection: Rejection, choice: Choice | None = None) -> list[Command]:
        self._log.decided(state.request, state.arrived_s, choice, rejection, self._now)
        self._requests.end(state.request.id, Outcome.REJECTED)
        return [Reject(rejection)]

    # progress of requests

    def _handle_prefill_started(self, event: ev.PrefillStarted, now: float) -> list[Command]:
        state = self._requests.attempt(event.request_id, event.attempt)
        if state is not None and state.phase is Phase.PREFILL and state.prefills_on(event.worker_id):
            self._view.prefill.started(event.worker_id, event.request_id, now)
            self._books.prefill_began(state)
        return []

    def _handle_prefill_finished(self, event: ev.PrefillFinished, now: float) -> list[Command]:
        state = self._requests.attempt(event.request_id, event.attempt)
        if state is None or state.phase is not Phase.PREFILL or not state.prefills_on(event.worker_id):
            return []
        self._books.prefill_done(state, now)
        wrong = self._learning.prefilled(state, event, now)
        commands = self._reports.ask(event.worker_id, now) if wrong else []
        if state.decode is None:
            return commands + self._choose_decode(state, now)
        self._books.begin_handover(state, now)
        return commands

    def _choose_decode(self, state: RequestState, now: float) -> list[Command]:
        """Late choice of the decode worker, once the prompt is computed (admission `on_prefill_done`)."""
        request, need = state.request, self._assessor.decode_need(state.request)
        choice = self._assessor.choose_decode(state, need, now)
        if choice is None:
            return self._interrupt(state, now, None)
        refused = admission.admit_to_decode(request, choice, self.config, self._books.timeline, now)
        if refused is not None:
            workers = state.workers
            self._books.release(state, now)
            self._requests.end(request.id, Outcome.REJECTED)
            return [Cancel(request.id, request.attempt, workers), Reject(refused)]
        self._books.reserve(state, choice.worker, need)
        self._books.begin_handover(state, now)
        return [StartDecode(request.id, request.attempt, choice.worker)]

    def _handle_handover_finished(self, event: ev.HandoverFinished, now: float) -> list[Command]:
        state = self._requests.attempt(event.request_id, event.attempt)
        if state is None or state.phase is Phase.DECODE:
            return []
        if state.phase is Phase.PREFILL:
            self._books.prefill_done(state, now)
        self._books.begin_decode(state, now)
        return []

    def _handle_first_token(self, event: ev.FirstToken, now: float) -> list[Command]:
        state = self._requests.attempt(event.request_id, event.attempt)
        if state is not None:
            self._books.measure_decode(state, now)
        return []

    def _handle_request_finished(self, event: ev.RequestFinished, now: float) -> list[Command]:
        state = self._requests.attempt(event.request_id, event.attempt)
        if state is None:
            if self._continuations.finished(event):
                self._requests.end(event.request_id, Outcome.FINISHED)
            return []
        self._learning.finished(state, event, now)
        self._books.release(state, now)
        self._requests.end(event.request_id, OUTCOMES[event.reason])
        return []

    def _handle_request_failed(self, event: ev.RequestFailed, now: float) -> list[Command]:
        state = self._requests.attempt(event.request_id, event.attempt)
        if state is None or event.worker_id not in state.workers:
            return []
        return self._interrupt(state, now, event.worker_id)

    def _interrupt(self, state: RequestState, now: float, failed: WorkerId | None) -> list[Command]:
        """The current attempt cannot go on: stop what is left of it and ask the front end for the continuation."""
        request = state.request
        others = tuple(worker for worker in state.workers if worker != failed)
        commands: list[Command] = [Cancel(request.id, request.attempt, others)] if others else []
        self._books.release(state, now)
        if failed is not None:
            state.avoid |= {failed}
        if request.attempt >= self.config.max_attempts:
            self._requests.end(request.id, Outcome.FAILED)
            message = f"given up after {request.attempt} attempts"
            return [*commands, Reject(admission.refuse(request, RejectReason.RETRIES_EXHAUSTED, message, 1.0))]
        state.enter(Phase.INTERRUPTED, now)
        self._continuations.interrupted(state)
        return [*commands, ResumeRequest(request.id, request.attempt)]

    # workers

    def _handle_worker_joined(self, event: ev.WorkerJoined, now: float) -> list[Command]:
        require_fit(event.worker, self.config)
        worker = event.worker.id
        known = self._view.epochs.get(worker)
        if known is not None and known >= event.epoch:
            return []
        commands = [] if known is None else self._lose(worker, known, now)
        if not self._reports.joined(worker, event.epoch):
            return commands
        self._view.join(event.worker, event.epoch)
        self._learning.joined(worker)
        for state in self._requests:
            state.avoid -= {worker}
        for state in self._continuations.orphans():
            commands += self._continue(state, now)
        return commands

    def _handle_worker_lost(self, event: ev.WorkerLost, now: float) -> list[Command]:
        if event.epoch < self._view.epochs.get(event.worker_id, event.epoch):
            return []
        return self._lose(event.worker_id, event.epoch, now)

    def _lose(self, worker: WorkerId, epoch: int, now: float) -> list[Command]:
        """A worker's life is over: its requests are interrupted, its claims forgotten."""
        commands: list[Command] = []
        for state in [state for state in self._requests if worker in state.workers]:
            commands += self._interrupt(state, now, worker)
        commands += self._reports.lost(worker, epoch, now)
        if worker in self._view.epochs:
            self._view.leave(worker)
            self._learning.left(worker)
            self._migration.worker_lost(worker, now)
        return commands

    # time

    def _handle_tick(self, event: ev.Tick, now: float) -> list[Command]:
        told = self._reports.take_in(now) + self._reports.ask_again(now)
        return told + self._give_up(now) + self._dispatch(now) + self._migration.round(now)

    def _give_up(self, now: float) -> list[Command]:
        """End requests whose continuation, or a worker for them, did not come in time."""
        commands: list[Command] = []
        for state in self._continuations.unanswered(now):
            message = f"no continuation came within {self.config.resume_timeout_s:g} s of a lost worker"
            commands += self._abandon(state, admission.refuse(state.request, RejectReason.RETRIES_EXHAUSTED, message, 1.0))
        for state in self._continuations.untaken(now) + self._line.untakeable(now):
            commands += self._abandon(state, self._assessor.nobody(state))
        return commands

    def _abandon(self, state: RequestState, rejection: Rejection) -> list[Command]:
        self._continuations.forget(state.request.id)
        self._line.remove(state.request.id)
        return self._reject(state, rejection)
