"""The requests that are in flight, and the count of those that have ended (I1, I10)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from conductor.core.cluster_view import Flow
from conductor.core.types import InvariantError, Placement, Request, RequestId, WorkerId


class Phase(StrEnum):
    """How far a request has come."""

    WAITING = "waiting"  # in the global queue: no worker has heard of it
    PREFILL = "prefill"  # sent to its prefill worker
    HANDOVER = "handover"  # prompt computed, KV on its way
    DECODE = "decode"
    INTERRUPTED = "interrupted"  # a worker failed; the front end has been asked for the continuation


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(slots=True)
class RequestState:
    """Everything known of one request in flight. `avoid` are workers that failed it."""

    request: Request
    arrived_s: float
    phase: Phase = Phase.WAITING
    phase_since_s: float = 0.0
    placement: Placement | None = None
    decode: WorkerId | None = None
    placed_s: float = 0.0
    claimed_tokens: int = 0  # of the prompt, by the reports of the prefill worker when it was chosen
    decode_s: float = 0.0  # how long it is expected to decode
    decoding_since_s: float | None = None
    decode_step_s: float = 0.0  # predicted without correction when it began to decode
    pull: Flow | None = None
    handover: Flow | None = None
    avoid: frozenset[WorkerId] = field(default_factory=frozenset)

    def enter(self, phase: Phase, now: float) -> None:
        self.phase, self.phase_since_s = phase, now

    def prefills_on(self, worker: WorkerId) -> bool:
        return self.placement is not None and self.placement.prefill == worker

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """The workers that the current attempt depends on, each once. Once it decodes, nothing of it is left where it was
        prefilled."""
        if self.placement is None:
            return ()
        if self.phase is Phase.DECODE and self.decode is not None:
            return (self.decode,)
        prefill = self.placement.prefill
        return (prefill,) if self.decode is None or self.decode == prefill else (prefill, self.decode)


class RequestTable:
    def __init__(self) -> None:
        self.arrived = 0
        self.ended = dict.fromkeys(Outcome, 0)
        self._live: dict[RequestId, RequestState] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._live.values())

    def add(self, state: RequestState) -> None:
        self.arrived += 1
        self._live[state.request.id] = state

    def get(self, request_id: RequestId) -> RequestState | None:
        return self._live.get(request_id)

    def attempt(self, request_id: RequestId, attempt: int) -> RequestState | None:
        """The request if `attempt` is the one that runs: events of former attempts find nothing."""
        state = self._live.get(request_id)
        running = state is not None and state.placement is not None and state.request.attempt == attempt
        return state if running else None

    def end(self, request_id: RequestId, outcome: Outcome) -> None:
        del self._live[request_id]
        self.ended[outcome] += 1

    def check(self) -> None:
        if self.arrived != sum(self.ended.values()) + len(self._live):
            raise InvariantError(f"I1: {self.arrived} arrived, {dict(self.ended)} ended, {len(self._live)} in flight")
        for request_id, state in self._live.items():
            if request_id != state.request.id:
                raise InvariantError(f"request {state.request.id} is filed under {request_id}")
            runs = state.phase in (Phase.PREFILL, Phase.HANDOVER, Phase.DECODE)
            if runs != (state.placement is not None):
                raise InvariantError(f"I10: {request_id} is in phase {state.phase} with placement {state.placement}")
