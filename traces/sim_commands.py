"""The command line of the simulator: `conductor simulate`, `conductor compare`, `conductor experiment`. Flags in, calls out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from conductor.core.config import ADMISSIONS, SchedulerConfig
from conductor.core.policies import POLICIES
from conductor.core.types import SLO
from traces.clusters.profile import ClusterError, ClusterProfile, load_profile, profile_names
from traces.commands import (
    BlockTokens,
    FormatName,
    HtmlTarget,
    JsonTarget,
    Limit,
    Strict,
    TracePath,
    opened,
)
from traces.compare import TraceSource, cells_of
from traces.compare_command import run_comparison
from traces.console import fail
from traces.experiment_command import run_experiment
from traces.experiments import EXPERIMENTS
from traces.replay_command import ReportTargets
from traces.simulate_command import FlightLogOpener, run_simulation
from traces.simulator import SimulationOptions

Cluster = Annotated[
    str, typer.Option("--cluster", help=f"Hardware: {', '.join(profile_names())}, or a YAML file.", metavar="NAME")
]
PrefillWorkers = Annotated[int, typer.Option("--prefill", min=1, help="Prefill workers.")]
DecodeWorkers = Annotated[int, typer.Option("--decode", min=1, help="Decode workers.")]
Admission = Annotated[str, typer.Option(help=f"When to refuse: {', '.join(ADMISSIONS)}.")]
Pulls = Annotated[bool, typer.Option(help="Let prefill workers pull blocks from each other.")]
T = TypeVar("T")
Seed = Annotated[int, typer.Option(help="Seed of policies that draw lots.")]
TtftObjective = Annotated[float | None, typer.Option("--slo-ttft", help="TTFT objective in seconds.")]
TbtObjective = Annotated[
    float | None, typer.Option("--slo-tbt", help="TBT objective in seconds (mean of the longest 10 % of gaps).")
]
EventLag = Annotated[float, typer.Option("--event-lag", min=0, help="Seconds by which workers' reports come late.")]


def register(app: typer.Typer, open_flight_log: FlightLogOpener) -> None:
    """Add the commands of this module to the `conductor` application."""
    app.command("simulate")(SimulateCommand(open_flight_log).simulate)
    app.command("compare")(compare)
    app.command("experiment")(experiment)


class SimulateCommand:
    """`conductor simulate`. The format of flight logs is not the simulator's: it is handed in."""

    def __init__(self, open_flight_log: FlightLogOpener) -> None:
        self._open_flight_log = open_flight_log

    def simulate(
        self,
        trace: TracePath,
        cluster: Cluster = "llama3-70b-8xa800",
        prefill: PrefillWorkers = 8,
        decode: DecodeWorkers = 8,
        policy: Annotated[str, typer.Option(help=f"Placement: {', '.join(POLICIES)}.")] = "conductor",
        admission: Admission = "early",
        speed: Annotated[float, typer.Option(help="Times faster than the trace.")] = 1.0,
        seed: Seed = 0,
        slo_ttft: TtftObjective = 30.0,
        slo_tbt: TbtObjective = 0.2,
        pulls: Pulls = True,
        event_lag: EventLag = 0.0,
        limit: Limit = None,
        format_name: FormatName = None,
        strict: Strict = False,
        block_tokens: BlockTokens = None,
        json_target: JsonTarget = None,
        html: HtmlTarget = None,
        flight_log: Annotated[
            Path | None, typer.Option("--flight-log", metavar="FILE", help="Write every event and command as JSON lines.")
        ] = None,
    ) -> None:
        """Replay a trace in virtual time with the scheduler that serves live traffic, over a simulated cluster."""
        source = opened(trace, format_name, strict=strict, limit=limit, block_tokens=block_tokens)
        profile = cluster_or_fail(cluster)
        try:
            options = SimulationOptions(
                cluster=profile,
                prefill_workers=prefill,
                decode_workers=decode,
                scheduler=SchedulerConfig(
                    block_tokens=profile.block_tokens,
                    policy=policy,
                    admission=admission,
                    slo=SLO(slo_ttft, slo_tbt),
                    allow_pull=pulls,
                    seed=seed,
                ),
                speed=speed,
                event_lag_s=event_lag,
            )
        except ValueError as error:
            raise fail(str(error)) from error
        log = None if flight_log is None else self._open_flight_log(flight_log, options.scheduler)
        raise typer.Exit(run_simulation(source, options, ReportTargets(json_target, html), log))


def compare(
    trace: TracePath,
    policies: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(POLICIES)}.")] = ",".join(POLICIES),
    speeds: Annotated[str, typer.Option(help="Comma-separated: times faster than the trace.")] = "1",
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0",
    cluster: Cluster = "llama3-70b-8xa800",
    prefill: PrefillWorkers = 8,
    decode: DecodeWorkers = 8,
    admission: Admission = "none",
    slo_ttft: TtftObjective = 30.0,
    slo_tbt: TbtObjective = 0.2,
    pulls: Pulls = True,
    event_lag: EventLag = 0.0,
    limit: Limit = None,
    format_name: FormatName = None,
    block_tokens: BlockTokens = None,
    directory: Annotated[Path, typer.Option("--out", help="Keeps each cell's figures; an interrupted run goes on.")] = Path(
        "comparison"
    ),
    ray_address: Annotated[str | None, typer.Option("--ray-address", help="Run on this Ray cluster, not here.")] = None,
    json_target: JsonTarget = None,
) -> None:
    """Simulate a trace under every combination of policies, speeds and seeds, in parallel; goes on where it was interrupted."""
    opened(trace, format_name, strict=False, block_tokens=block_tokens)
    profile = cluster_or_fail(cluster)
    source = TraceSource(trace, format_name, block_tokens, limit)
    try:
        config = SchedulerConfig(
            block_tokens=profile.block_tokens,
            admission=admission,
            slo=SLO(slo_ttft, slo_tbt),
            allow_pull=pulls,
        )
        base = SimulationOptions(profile, prefill, decode, scheduler=config, event_lag_s=event_lag)
        names = listed(policies, "policies", str)
        cells = cells_of(source, base, names, listed(speeds, "speeds", float), listed(seeds, "seeds", int))
    except ValueError as error:
        raise fail(str(error)) from error
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise fail(f"policies holds {unknown[0]!r}; allowed: {', '.join(POLICIES)}")
    run_comparison(cells, directory, ray_address, json_target)


def experiment(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(EXPERIMENTS)}.", metavar="NAME")],
    trace: TracePath,
    limit: Limit = None,
    json_target: JsonTarget = None,
) -> None:
    """Repeat an experiment of the Mooncake paper: its figures beside ours, and which of its claims hold."""
    if name not in EXPERIMENTS:
        raise fail(f"experiment is {name!r}; allowed: {', '.join(EXPERIMENTS)}")
    raise typer.Exit(run_experiment(EXPERIMENTS[name], opened(trace, None, strict=False, limit=limit), json_target))


def listed(text: str, name: str, kind: Callable[[str], T]) -> list[T]:
    """The values of a comma-separated option. Raises ValueError naming the option."""
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}; allowed: comma-separated values ({error})") from error


def cluster_or_fail(name_or_path: str) -> ClusterProfile:
    """The cluster profile, or a line of error and the end of the command."""
    try:
        return load_profile(name_or_path)
    except ClusterError as error:
        raise fail(str(error)) from error
