"""The command line of the simulator: `conductor simulate`, `conductor compare`, `conductor experiment`. Flags in, calls out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
from traces.console import fail
from traces.replay_command import ReportTargets
from traces.simulate_command import FlightLogOpener, run_simulation
from traces.simulator import SimulationOptions

Cluster = Annotated[
    str, typer.Option("--cluster", help=f"Hardware: {', '.join(profile_names())}, or a YAML file.", metavar="NAME")
]
PrefillWorkers = Annotated[int, typer.Option("--prefill", min=1, help="Prefill workers.")]
DecodeWorkers = Annotated[int, typer.Option("--decode", min=1, help="Decode workers.")]
Seed = Annotated[int, typer.Option(help="Seed of policies that draw lots.")]
TtftObjective = Annotated[float | None, typer.Option("--slo-ttft", help="TTFT objective in seconds.")]
TbtObjective = Annotated[
    float | None, typer.Option("--slo-tbt", help="TBT objective in seconds (mean of the longest 10 % of gaps).")
]
EventLag = Annotated[float, typer.Option("--event-lag", min=0, help="Seconds by which workers' reports come late.")]


def register(app: typer.Typer, open_flight_log: FlightLogOpener) -> None:
    """Add the commands of this module to the `conductor` application."""
    app.command("simulate")(SimulateCommand(open_flight_log).simulate)


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
        admission: Annotated[str, typer.Option(help=f"When to refuse: {', '.join(ADMISSIONS)}.")] = "early",
        speed: Annotated[float, typer.Option(help="Times faster than the trace.")] = 1.0,
        seed: Seed = 0,
        slo_ttft: TtftObjective = 30.0,
        slo_tbt: TbtObjective = 0.2,
        pulls: Annotated[bool, typer.Option(help="Let prefill workers pull blocks from each other.")] = True,
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


def cluster_or_fail(name_or_path: str) -> ClusterProfile:
    """The cluster profile, or a line of error and the end of the command."""
    try:
        return load_profile(name_or_path)
    except ClusterError as error:
        raise fail(str(error)) from error
