"""What the simulated workers know of one attempt of one request, and the record that stays of the request."""

from __future__ import annotations

from dataclasses import dataclass

from conductor.core.types import Placement, Rejection, Request
from traces.sim.links import Flow


@dataclass(slots=True)
class RequestRecord:
    """Everything that happened to one request of the trace, over all its attempts. Times are virtual seconds."""

    index: int
    request: Request
    arrival_s: float
    output_tokens: int
    placement: Placement | None = None
    rejection: Rejection | None = None
    failure: str | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    emitted_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    prefill_start_s: float | None = None
    tbt_s: float | None = None


class Job:
    """One attempt on its way through the engines.

    `done_tokens` are computed or reused, `begun_tokens` those that steps have been begun for too; `pinned` is the number of the
    prompt's blocks that the prefill worker keeps for it; `private_blocks` is its room there without identity. `join_wait_s` is
    how long after its first token, made by prefill, it joined a decode batch; None when decode makes the first token.
    """

    __slots__ = (
        "ahead_s",
        "begun_tokens",
        "cancelled",
        "compute_s",
        "context_tokens",
        "decode_id",
        "done_tokens",
        "first_step",
        "first_token_s",
        "flow",
        "handover_start_s",
        "join_wait_s",
        "joined_run",
        "kv_arrived_s",
        "last_step",
        "order",
        "output_tokens",
        "pinned",
        "placement",
        "private_blocks",
        "prompt_tokens",
        "record",
        "request",
        "reserved_blocks",
        "reused_tokens",
    )

    def __init__(self, record: RequestRecord, request: Request, placement: Placement, order: int) -> None:
        self.record = record
        self.request = request
        self.placement = placement
        self.order = order
        self.decode_id = placement.decode
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = record.output_tokens - request.emitted_tokens
        self.done_tokens = 0
        self.begun_tokens = 0
        self.reused_tokens = 0
        self.pinned = 0
        self.private_blocks = 0
        self.reserved_blocks = 0
        self.ahead_s = 0.0
        self.compute_s = 0.0
        self.context_tokens = 0
        self.first_step = 0
        self.last_step = 0
        self.joined_run = 0
        self.first_token_s: float | None = None
        self.handover_start_s = 0.0
        self.kv_arrived_s: float | None = None
        self.join_wait_s: float | None = None
        self.flow: Flow | None = None
        self.cancelled = False
