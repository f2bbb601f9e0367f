"""Late binding: requests wait here, not on a worker, until a prefill worker is about to go idle.

A request bound on arrival can only be right about the caches and queues of that moment. One that waits centrally is looked at
again when it is its turn, may go to whoever is free first, and lets short work (a long hit makes work short) pass long work.
Order is by predicted work plus `aging` times arrival time: static, and nobody is overtaken for ever; whoever has waited
`max_wait_s` goes first whatever its length.

A pass walks the head of the line in that order and asks the policy for each request, with the work of requests earlier in
line already added to the workers they want. A request whose chosen worker is about to go idle is dispatched; one that would
rather wait for a busy worker (which holds its prefix) books that worker for the rest of the pass and keeps its place.
Who waits and can be taken by nobody any more, because workers went or take no more work, is given up after `orphan_wait_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, takewhile
from typing import NamedTuple

import numpy as np
from sortedcontainers import SortedKeyList

from conductor.core.cluster_view import ClusterView
from conductor.core.config import QueueConfig
from conductor.core.placement import Choice, Policy, Situation
from conductor.core.prefill_pool import PrefillPool
from conductor.core.requests import RequestState
from conductor.core.types import InvariantError, RequestId
from conductor.core.worker_table import FloatArray, lowest_of, some

MIN_WAIT_S = 1e-4  # between two passes: an idle time that rounding puts a hair after `now` must not stop the clock


class Waiting(NamedTuple):
    """A request in line. `key` orders it; `number` counts arrivals."""

    state: RequestState
    key: float
    number: int
    work_s: float


class Turn(NamedTuple):
    """A request whose turn has come, as it was looked at."""

    state: RequestState
    situation: Situation
    choice: Choice


class Pass:
    """What one pass over the line has promised so far: work that requests earlier in line will bring to the workers they want
    (`booked_s`, None while there is none), and engine steps begun to be filled.

    Several short prompts computed in one step pay its fixed cost once. That is worth it only while others wait (`crowded`):
    whoever shares a step is done no earlier than the whole of it.
    """

    def __init__(self, pool: PrefillPool, crowded: bool) -> None:
        self.booked_s: FloatArray | None = None
        self._room: dict[int, float] = {}
        self._pool = pool
        self._crowded = crowded

    def book(self, row: int, work_s: float) -> None:
        if self.booked_s is None:
            self.booked_s = np.zeros(len(self._pool))
        self.booked_s[row] += work_s

    def join(self, row: int, new_tokens: float) -> None:
        if self._crowded and self._pool.packs_prompts[row]:
            self._room[row] = self._room.get(row, float(self._pool.chunk_tokens[row])) - new_tokens

    def has_room(self, row: int, new_tokens: float) -> bool:
        return self._room.get(row, 0.0) >= new_tokens

    def any_room(self) -> bool:
        return any(room > 0.0 for room in self._room.values())


class LateBinding:
    """The line. `assess(state, now, booked_s)` is what a policy sees of a request, with `booked_s` more work on the workers;
    `may_be_taken(state)` whether any worker may ever take it, as things are."""

    def __init__(
        self,
        config: QueueConfig,
        view: ClusterView,
        policy: Policy,
        assess: Callable[[RequestState, float, FloatArray | None], Situation | None],
        may_be_taken: Callable[[RequestState], bool],
    ) -> None:
        self._config = config
        self._view = view
        self._policy = policy
        self._assess = assess
        self._may_be_taken = may_be_taken
        self._entries: dict[RequestId, Waiting] = {}
        self._order: SortedKeyList[Waiting] = SortedKeyList(key=lambda entry: (entry.key, entry.number))
        self._numbers = 0
        self.work_s = 0.0  # of all who wait
        self._due_s = math.inf
        self._untakeable_since_s: dict[RequestId, float] = {}  # in order of time

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        return self._config.max_requests is not None and len(self) >= self._config.max_requests

    def add(self, state: RequestState, work_s: float, now: float) -> None:
        """Join the line. `work_s` is the predicted work where the request's prefix is cached best."""
        self._numbers += 1
        entry = self._entries[state.request.id] = Waiting(state, self._key(state, work_s), self._numbers, work_s)
        self.work_s += work_s
        self._order.add(entry)
        self._note(state, self._may_be_taken(state), now)
        self._due_s = min(self._due_s, now + self._config.burst_window_s)

    def work_before_s(self, state: RequestState, work_s: float, now: float) -> float:
        """Seconds of work of those whose turn comes before this request's, in line already or about to join with `work_s`."""
        if not self._entries:
            return 0.0
        entry = self._entries.get(state.request.id)
        place = (self._key(state, work_s), math.inf) if entry is None else (entry.key, entry.number)
        before_s: float = sum(other.work_s for other in self._order.islice(0, self._order.bisect_key_left(place)))
        return before_s + sum(other.work_s for other in self._late(now) if (other.key, other.number) > place)

    def remove(self, request_id: RequestId) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._order.remove(entry)
            self._untakeable_since_s.pop(request_id, None)
            self.work_s = self.work_s - entry.work_s if self._entries else 0.0

    def next_deadline(self) -> float:
        if not self._entries:
            return math.inf
        given_up_s = next(iter(self._untakeable_since_s.values()), math.inf) + self._config.orphan_wait_s
        return min(self._due_s, given_up_s)

    def look_soon(self, now: float) -> None:
        """A worker came, or became free: look at the line at once."""
        self._due_s = min(self._due_s, now)

    def workers_changed(self, now: float) -> None:
        """Workers came, went, or take no more work: who can be taken at all?"""
        for entry in self._entries.values():
            self._note(entry.state, self._may_be_taken(entry.state), now)

    def untakeable(self, now: float) -> list[RequestState]:
        """Requests that nobody could take for too long."""
        late = takewhile(lambda item: now >= item[1] + self._config.orphan_wait_s, self._untakeable_since_s.items())
        return [self._entries[request_id].state for request_id, _ in late]

    def turns(self, now: float) -> Iterator[Turn]:
        """The requests to dispatch, in order. Each must be booked before the next is asked for."""
        if now < self._due_s or not self._entries:
            return
        self._due_s = math.inf
        pool = self._view.prefill
        promised = Pass(pool, len(self) > self._config.pack_backlog * len(pool))
        for entry in list(islice(self._in_order(now), self._config.look_ahead)):
            if not (self._someone_is_free(now) or promised.any_room()):
                break
            turn = self._look_at(entry.state, now, promised)
            if turn is not None:
                self.remove(entry.state.request.id)
                yield turn
        if self._entries:
            self._due_s = min(self._due_s, self._next_idle_s(now))

    def _look_at(self, state: RequestState, now: float, promised: Pass) -> Turn | None:
        situation = self._assess(state, now, promised.booked_s)
        choice = None if situation is None else self._policy(situation)
        self._note(state, choice is not None, now)
        if situation is None or choice is None:
            return None
        table, row = choice.candidates, choice.row
        plans = table.plans
        new_tokens = situation.request.prompt_tokens - table.local_tokens[row] - plans.fetched_tokens[row]
        if table.queue_s[row] > self._config.dispatch_ahead_s and not promised.has_room(row, new_tokens):
            promised.book(row, plans.prefill_s[row] + plans.transfer_s[row])
            return None
        promised.join(row, new_tokens)
        return Turn(state, situation, choice)

    def _note(self, state: RequestState, takeable: bool, now: float) -> None:
        if takeable:
            self._untakeable_since_s.pop(state.request.id, None)
        else:
            self._untakeable_since_s.setdefault(state.request.id, now)

    def _in_order(self, now: float) -> Iterable[Waiting]:
        """Whoever has waited too long first, by arrival; then by key."""
        late = {entry.number: entry for entry in self._late(now)}
        return chain(late.values(), (entry for entry in self._order if entry.number not in late)) if late else self._order

    def _late(self, now: float) -> Iterator[Waiting]:
        """Whoever has waited too long, by arrival."""
        limit_s = now - self._config.max_wait_s
        return takewhile(lambda entry: entry.state.arrived_s <= limit_s, self._entries.values())

    def _key(self, state: RequestState, work_s: float) -> float:
        config, priority = self._config, int(state.request.priority)
        return work_s + config.aging * state.arrived_s + config.priority_step_s * priority

    def _someone_is_free(self, now: float) -> bool:
        pool = self._view.prefill
        return some((pool.queue_s(now) <= self._config.dispatch_ahead_s) & pool.accepts)

    def _next_idle_s(self, now: float) -> float:
        """When the next busy worker is about to go idle."""
        pool, ahead_s = self._view.prefill, self._config.dispatch_ahead_s
        busy_s = pool.queue_s(now)
        busy_s = busy_s[(busy_s > ahead_s) & pool.accepts]
        return now + max(lowest_of(busy_s) - ahead_s, MIN_WAIT_S) if len(busy_s) else math.inf

    def check(self) -> None:
        if len(self._entries) != len(self._order):
            raise InvariantError(f"{len(self._entries)} requests wait, {len(self._order)} are in order")
        since_s = list(self._untakeable_since_s.values())
        if since_s != sorted(since_s) or not self._untakeable_since_s.keys() <= self._entries.keys():
            raise InvariantError(f"requests {list(self._untakeable_since_s)} are given up at {since_s}, in that order")
