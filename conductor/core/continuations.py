"""Requests that lost a worker: first the front end is asked for their continuation, then a worker must be there to take it.

Both waits are bounded. A request that waits in neither place is not known here.
"""

from __future__ import annotations

import math

from conductor.core.config import SchedulerConfig
from conductor.core.events import RequestFinished
from conductor.core.requests import RequestState
from conductor.core.types import InvariantError, RequestId


class Continuations:
    def __init__(self, config: SchedulerConfig) -> None:
        self._resume_timeout_s = config.resume_timeout_s
        self._orphan_wait_s = config.queue.orphan_wait_s
        self._interrupted: dict[RequestId, RequestState] = {}
        self._orphans: dict[RequestId, RequestState] = {}

    def interrupted(self, state: RequestState) -> None:
        """The front end has been asked to go on with this request."""
        self._interrupted[state.request.id] = state

    def orphaned(self, state: RequestState) -> None:
        """The continuation is here, and no worker can take it."""
        self._orphans[state.request.id] = state

    def forget(self, request_id: RequestId) -> None:
        """The request waits no more: it has been placed, or has ended."""
        self._interrupted.pop(request_id, None)
        self._orphans.pop(request_id, None)

    def finished(self, event: RequestFinished) -> bool:
        """An interrupted attempt had finished before its worker was lost, and this late word of it is true: nothing is left to
        go on with."""
        state = self._interrupted.get(event.request_id)
        if state is None or state.request.attempt != event.attempt or not event.reason.is_natural:
            return False
        del self._interrupted[event.request_id]
        return True

    def orphans(self) -> list[RequestState]:
        return list(self._orphans.values())

    def unanswered(self, now: float) -> list[RequestState]:
        """Requests whose continuation did not come in time."""
        return [state for state in self._interrupted.values() if now >= state.phase_since_s + self._resume_timeout_s]

    def untaken(self, now: float) -> list[RequestState]:
        """Continuations for which no worker came in time."""
        return [state for state in self._orphans.values() if now >= state.phase_since_s + self._orphan_wait_s]

    def next_deadline(self) -> float:
        if not self._interrupted and not self._orphans:
            return math.inf
        limits = [state.phase_since_s + self._resume_timeout_s for state in self._interrupted.values()]
        limits += [state.phase_since_s + self._orphan_wait_s for state in self._orphans.values()]
        return min(limits)

    def check(self) -> None:
        both = self._interrupted.keys() & self._orphans.keys()
        if both:
            raise InvariantError(f"{sorted(both)} wait for a continuation and have one")
