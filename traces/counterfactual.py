"""What another policy would have made of a flight log: the log's arrivals on simulated workers, once under the policy that
was in force and once under the other.

Both sides run in the simulator on the same ground truth, so their difference is the policy's. That truth is either a named
cluster profile or, without one, a cluster built from what the log's own workers said of their speed when they joined. What
really happened stands beside both, as far as the log tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol

from conductor.core.commands import Command, Reject
from conductor.core.config import SchedulerConfig
from conductor.core.events import Event, FirstToken, PrefillFinished, RequestArrived, RequestFinished, WorkerJoined
from conductor.core.placement import Policy
from conductor.core.types import Role, Tier, WorkerSpec
from traces.clusters.profile import (
    ClusterProfile,
    FirstTokenFrom,
    Handover,
    LinearDecodeValues,
    NetworkValues,
    QuadraticValues,
)
from traces.outcomes import OutcomeStatus, RequestOutcome
from traces.schema import TraceRequest
from traces.simulator import SimulationOptions, simulate

UNLIMITED_BYTES_PER_S = 1e12
UNLIMITED_BLOCKS = 1 << 20


class Record(Protocol):
    """One call of `Scheduler.handle`, as a flight log holds it."""

    @property
    def now(self) -> float: ...
    @property
    def event(self) -> Event: ...
    @property
    def commands(self) -> Sequence[Command]: ...


@dataclass(slots=True)
class Recorded:
    """What a log tells of one request."""

    request_id: str
    arrived_s: float
    row: TraceRequest
    ttft_s: float | None = None
    reused_tokens: int = 0
    rejected: bool = False


@dataclass(slots=True)
class Flight:
    """A log read for its arrivals: requests in order, and the workers of its beginning."""

    requests: dict[str, Recorded] = field(default_factory=dict)
    workers: dict[str, WorkerSpec] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Side:
    """One request under one policy."""

    ttft_s: float | None
    reused_tokens: int
    rejected: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """One request: recorded, simulated under the policy in force, simulated under the other."""

    request_id: str
    recorded: Side
    before: Side
    after: Side


def read_flight(records: Iterable[Record]) -> Flight:
    """Collect arrivals and their fates. Raises ValueError when the log has no request or no worker."""
    flight = Flight()
    for record in records:
        _take(flight, record.now, record.event)
        for command in record.commands:
            if isinstance(command, Reject) and command.rejection.request_id in flight.requests:
                flight.requests[command.rejection.request_id].rejected = True
    if not flight.requests:
        raise ValueError("the log has 0 requests; allowed: at least one RequestArrived record")
    if not flight.workers:
        raise ValueError("the log has 0 workers; allowed: a log that begins with the run, so that workers join in it")
    return flight


def _take(flight: Flight, now: float, event: Event) -> None:
    match event:
        case WorkerJoined(worker=worker):
            flight.workers.setdefault(worker.id, worker)
        case RequestArrived(request=request) if request.id not in flight.requests:
            size = next(iter(flight.workers.values())).profile.block_tokens if flight.workers else 0
            row = TraceRequest(now, request.prompt_tokens, request.max_output_tokens, request.block_hashes, size)
            row = replace(row, session=request.session, traffic_class=request.traffic_class)
            flight.requests[request.id] = Recorded(request.id, now, row)
        case PrefillFinished(request_id=request_id, attempt=1, reused_tokens=reused) if request_id in flight.requests:
            flight.requests[request_id].reused_tokens = reused
        case FirstToken(request_id=request_id, attempt=1) if request_id in flight.requests:
            flight.requests[request_id].ttft_s = now - flight.requests[request_id].arrived_s
        case RequestFinished(request_id=request_id, output_tokens=tokens) if request_id in flight.requests:
            recorded = flight.requests[request_id]
            recorded.row = replace(recorded.row, output_tokens=tokens)
        case _:
            pass


def cluster_of(workers: Iterable[WorkerSpec]) -> ClusterProfile:
    """Ground truth for a simulation, from what the first prefill and decode workers announced."""
    specs = list(workers)
    prefill = next((spec for spec in specs if spec.role is not Role.DECODE), specs[0])
    decode = next((spec for spec in specs if spec.role is not Role.PREFILL), specs[0])
    speed, steps = prefill.profile, decode.profile
    return ClusterProfile(
        description="as the log's workers announced themselves",
        gpus_per_worker=1,
        kv_bytes_per_token=speed.kv_bytes_per_token,
        block_tokens=speed.block_tokens,
        step_tokens=speed.chunk_tokens or 1 << 20,
        max_batch=decode.max_batch,
        device_blocks=prefill.capacity_blocks.get(Tier.DEVICE, UNLIMITED_BLOCKS),
        prefill=QuadraticValues(
            form="quadratic",
            base_s=speed.prefill_base_s,
            per_token_s=max(speed.prefill_per_token_s, 1e-9),
            per_token2_s=speed.prefill_per_token2_s,
            tile_tokens=1,
        ),
        decode=LinearDecodeValues(
            form="linear",
            base_s=max(steps.decode_base_s, 1e-6),
            per_sequence_s=steps.decode_per_sequence_s,
            per_context_token_s=steps.decode_per_context_token_s,
        ),
        network=NetworkValues(
            nic_bytes_per_s=min(speed.transfer_bytes_per_s, UNLIMITED_BYTES_PER_S),
            latency_s=speed.transfer_latency_s,
            contention=True,
        ),
        layer_groups=speed.layer_groups,
        handover=Handover.STREAMED if speed.handover_overlaps_prefill else Handover.AFTER_PROMPT,
        first_token=FirstTokenFrom.DECODE if speed.first_token_after_handover else FirstTokenFrom.PREFILL,
    )


def compare(
    flight: Flight,
    before: SchedulerConfig,
    after: SchedulerConfig,
    load_policy: Callable[[str], Policy],
    cluster: ClusterProfile | None = None,
) -> list[Difference]:
    """Run the arrivals under both configurations. Deterministic."""
    roles = [spec.role for spec in flight.workers.values()]
    options = SimulationOptions(
        cluster or cluster_of(flight.workers.values()),
        prefill_workers=roles.count(Role.PREFILL),
        decode_workers=roles.count(Role.DECODE),
        coupled_workers=roles.count(Role.COUPLED),
        scheduler=before,
        policy=load_policy(before.policy),
    )
    requests = list(flight.requests.values())
    rows = [request.row for request in requests]
    first = simulate(rows, options)
    second = simulate(rows, replace(options, scheduler=after, policy=load_policy(after.policy)))
    return [
        Difference(one.request_id, Side(one.ttft_s, one.reused_tokens, one.rejected), _side(old), _side(new))
        for one, old, new in zip(requests, first.outcomes, second.outcomes, strict=True)
    ]


def _side(outcome: RequestOutcome) -> Side:
    return Side(outcome.ttft_s, outcome.reused_tokens or 0, outcome.status is OutcomeStatus.REJECTED)


def totals(differences: Sequence[Difference], which: str) -> dict[str, float | int | None]:
    """Mean TTFT, reused tokens and rejections of one side (`recorded`, `before` or `after`)."""
    sides: list[Side] = [getattr(difference, which) for difference in differences]
    seen = [side.ttft_s for side in sides if side.ttft_s is not None]
    return {
        "requests": len(sides),
        "mean_ttft_s": fmean(seen) if seen else None,
        "reused_tokens": sum(side.reused_tokens for side in sides),
        "rejected": sum(side.rejected for side in sides),
    }
