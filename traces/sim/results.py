"""From what happened in a simulation to the `RunResult` that reports are made of."""

from __future__ import annotations

from collections import Counter
from heapq import nlargest
from statistics import fmean
from typing import TYPE_CHECKING

from traces.outcomes import OutcomeStatus, RequestOutcome, RunMode, RunResult
from traces.sim.cache import BlockCache
from traces.sim.hindsight import Hindsight
from traces.sim.job import RequestRecord

if TYPE_CHECKING:
    from traces.simulator import Simulation

RANKS = (1, 10, 100, 1_000, 10_000)


def collect(name: str, simulation: Simulation) -> RunResult:
    """The result of a finished simulation. Holds no real time, so that equal runs give equal bytes."""
    options = simulation.options
    nodes = options.prefill_workers * options.cluster.pipeline.stages + options.decode_workers + options.coupled_workers
    outcomes = tuple(outcome_of(record, simulation.hindsight) for record in simulation.records.values())
    return RunResult(
        mode=RunMode.SIMULATED,
        trace=name,
        slo=options.scheduler.slo,
        outcomes=outcomes,
        duration_s=max((_last_moment_s(record) for record in simulation.records.values()), default=0.0),
        wall_s=None,
        settings={
            "policy": options.scheduler.policy,
            "admission": options.scheduler.admission,
            "prefill_workers": options.prefill_workers,
            "decode_workers": options.decode_workers,
            "coupled_workers": options.coupled_workers,
            "speed": options.speed,
            "seed": options.scheduler.seed,
            "event_lag_s": options.event_lag_s,
        },
        gpus=nodes * options.cluster.gpus_per_worker,
        bytes_moved=dict(sorted(simulation.cluster.network.bytes_moved.items())),
        replicas=replicas(simulation),
        load_max_over_mean=_load_max_over_mean(simulation),
        prefill_busy_s=sum(_busy_s(simulation)),
        loads=tuple(simulation.watch.loads),
        holders=_holders(simulation),
    )


def _holders(simulation: Simulation) -> dict[int, tuple[int, ...]]:
    log = simulation.watch.replicas
    if log is None:
        return {}
    log.count(_pools(simulation))
    return log.holders(RANKS)


def _pools(simulation: Simulation) -> list[BlockCache]:
    return [worker.cache for worker in simulation.cluster.workers.values() if worker.prefill is not None]


def replicas(simulation: Simulation) -> dict[str, float]:
    """Mean number of prefill workers that hold one of the N most used blocks, for N as in figure 11 of the paper (FAST'25)."""
    uses: Counter[int] = Counter()
    for record in simulation.records.values():
        uses.update(record.request.block_hashes)
    ranked = nlargest(RANKS[-1], uses, key=uses.__getitem__)
    pools = _pools(simulation)
    holders = [sum(block in pool for pool in pools) for block in ranked]
    return {str(rank): fmean(holders[:rank]) for rank in RANKS if rank <= len(holders)}


def outcome_of(record: RequestRecord, hindsight: Hindsight) -> RequestOutcome:
    """What became of one request."""
    status = _status(record)
    placement, request = record.placement, record.request
    return RequestOutcome(
        index=record.index,
        due_s=record.arrival_s,
        input_tokens=request.prompt_tokens,
        status=status,
        sent_s=record.arrival_s,
        ttft_s=_since(record, record.first_token_s),
        tbt_s=record.tbt_s,
        tpot_s=_tpot_s(record),
        e2e_s=_since(record, record.finished_s),
        output_tokens=record.emitted_tokens,
        reused_tokens=record.reused_tokens,
        predicted_ttft_s=None if placement is None else placement.ttft.total_s,
        reason=_reason(record),
        wasted_prefill_tokens=0 if status is OutcomeStatus.COMPLETED else record.computed_tokens,
        falsely_rejected=hindsight.falsely_rejected(record) if status is OutcomeStatus.REJECTED else None,
        prefill_worker=None if placement is None else placement.prefill,
        decode_worker=None if placement is None else placement.decode,
        traffic_class=request.traffic_class,
    )


def _last_moment_s(record: RequestRecord) -> float:
    return record.arrival_s if record.finished_s is None else record.finished_s


def _status(record: RequestRecord) -> OutcomeStatus:
    if record.finished_s is not None:
        return OutcomeStatus.COMPLETED
    if record.rejection is not None:
        return OutcomeStatus.REJECTED
    return OutcomeStatus.UNFINISHED if record.failure is None else OutcomeStatus.FAILED


def _reason(record: RequestRecord) -> str | None:
    if record.finished_s is not None:
        return None
    return record.failure if record.rejection is None else record.rejection.reason.value


def _since(record: RequestRecord, moment_s: float | None) -> float | None:
    return None if moment_s is None else moment_s - record.arrival_s


def _tpot_s(record: RequestRecord) -> float | None:
    """Mean gap between tokens."""
    if record.finished_s is None or record.first_token_s is None or record.output_tokens < 2:
        return None
    return (record.finished_s - record.first_token_s) / (record.output_tokens - 1)


def _load_max_over_mean(simulation: Simulation) -> float | None:
    """How unevenly the prefill workers were busy."""
    busy = _busy_s(simulation)
    total = sum(busy)
    return max(busy) * len(busy) / total if total > 0 else None


def _busy_s(simulation: Simulation) -> list[float]:
    return [worker.prefill.busy_s for worker in simulation.cluster.workers.values() if worker.prefill is not None]
