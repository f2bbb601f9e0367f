"""The command line of the simulator: `conductor simulate`, `conductor compare`, `conductor experiment`. Flags in, calls out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import typer

from conductor.core.config import ADMISSIONS, SchedulerConfig
from conductor.core.placement import Policy
from conductor.core.policies import POLICIES
from conductor.core.types import SLO
from traces.clusters.measured import measured_profile
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
from traces.console import fail, standard_error
from traces.experiment_command import run_experiment
from traces.experiments import EXPERIMENTS
from traces.replay_command import ReportTargets
from traces.simulate_command import FlightLogOpener, run_simulation
from traces.simulator import Outage, SimulationOptions

Cluster = Annotated[
    str, typer.Option("--cluster", help=f"Hardware: {', '.join(profile_names())}, or a YAML file.", metavar="NAME")
]
PrefillWorkers = Annotated[int | None, typer.Option("--prefill", min=0, help="Prefill workers; 8 unless --coupled is given.")]
DecodeWorkers = Annotated[int | None, typer.Option("--decode", min=0, help="Decode workers; 8 unless --coupled is given.")]
CoupledWorkers = Annotated[int, typer.Option("--coupled", min=0, help="Workers that prefill and decode on one engine.")]
ChunkedPrefill = Annotated[
    bool | None,
    typer.Option("--chunked-prefill/--no-chunked-prefill", help="Cut prompts into steps, else as the profile says."),
]
PrefixCache = Annotated[
    bool | None, typer.Option("--prefix-cache/--no-prefix-cache", help="Reuse cached prefixes, else as the profile says.")
]
LoadReports = Annotated[float | None, typer.Option(help="Seconds between load reports of each worker; none unless given.")]
POLICY_NAMES = f"{', '.join(POLICIES)}, an entry point, or module:function"
DEFAULT_WORKERS = 8
MEASURABLE_CLUSTER = "smollm2-cpu"
Admission = Annotated[str, typer.Option(help=f"When to refuse: {', '.join(ADMISSIONS)}.")]
Pulls = Annotated[bool, typer.Option(help="Let prefill workers pull blocks from each other.")]
T = TypeVar("T")
PolicyLoader: TypeAlias = Callable[[str], Policy]
"""Finds the policy of a name. Raises ValueError naming what is allowed."""
OUTAGE = re.compile(r"([^@]+)@(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?")
Seed = Annotated[int, typer.Option(help="Seed of policies that draw lots.")]
TtftObjective = Annotated[float | None, typer.Option("--slo-ttft", help="TTFT objective in seconds.")]
TbtObjective = Annotated[
    float | None, typer.Option("--slo-tbt", help="TBT objective in seconds (mean of the longest 10 % of gaps).")
]
EventLag = Annotated[float, typer.Option("--event-lag", min=0, help="Seconds by which workers' reports come late.")]


def register(app: typer.Typer, open_flight_log: FlightLogOpener, measured: Path, load_policy: PolicyLoader) -> None:
    """Add the commands of this module to the `conductor` application. `measured` is the folder of this machine's profiles."""
    commands = SimulatorCommands(open_flight_log, measured, load_policy)
    app.command("simulate")(commands.simulate)
    app.command("compare")(commands.compare)
    app.command("experiment")(experiment)


class SimulatorCommands:
    """`conductor simulate` and `compare`. The format of flight logs, the place of profiles and where policies come from are
    handed in."""

    def __init__(self, open_flight_log: FlightLogOpener, measured: Path, load_policy: PolicyLoader) -> None:
        self._open_flight_log = open_flight_log
        self._measured = measured
        self._load_policy = load_policy

    def _cluster(self, name_or_path: str, chunked_prefill: bool | None, prefix_cache: bool | None) -> ClusterProfile:
        """The cluster profile with what the flags change of it, or a line of error and the end of the command."""
        try:
            profile = load_profile(name_or_path)
            found = measured_profile(profile, self._measured) if name_or_path == MEASURABLE_CLUSTER else None
        except ClusterError as error:
            raise fail(str(error)) from error
        if found is not None:
            profile, path = found
            standard_error().print(f"cluster {name_or_path} as measured here: {path}", highlight=False, soft_wrap=True)
        flags = {"chunked_prefill": chunked_prefill, "reuse_blocks": prefix_cache}
        return profile.model_copy(update={name: value for name, value in flags.items() if value is not None})

    def simulate(
        self,
        trace: TracePath,
        cluster: Cluster = "llama3-70b-8xa800",
        prefill: PrefillWorkers = None,
        decode: DecodeWorkers = None,
        coupled: CoupledWorkers = 0,
        chunked_prefill: ChunkedPrefill = None,
        prefix_cache: PrefixCache = None,
        lose: Annotated[
            list[str] | None,
            typer.Option(metavar="WORKER@AT[-BACK]", help="A node dies at AT seconds and is back, empty, at BACK; repeatable."),
        ] = None,
        load_reports: LoadReports = None,
        policy: Annotated[str, typer.Option(help=f"Placement: {POLICY_NAMES}.")] = "conductor",
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
        profile = self._cluster(cluster, chunked_prefill, prefix_cache)
        try:
            options = SimulationOptions(
                profile,
                *pools(prefill, decode, coupled),
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
                load_reports_s=load_reports,
                outages=tuple(outage(text) for text in lose or ()),
                policy=self._load_policy(policy),
            )
        except ValueError as error:
            raise fail(str(error)) from error
        log = None if flight_log is None else self._open_flight_log(flight_log, options.scheduler)
        raise typer.Exit(run_simulation(source, options, ReportTargets(json_target, html), log))

    def compare(
        self,
        trace: TracePath,
        policies: Annotated[str, typer.Option(help=f"Comma-separated: {POLICY_NAMES}.")] = ",".join(POLICIES),
        speeds: Annotated[str, typer.Option(help="Comma-separated: times faster than the trace.")] = "1",
        seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0",
        cluster: Cluster = "llama3-70b-8xa800",
        prefill: PrefillWorkers = None,
        decode: DecodeWorkers = None,
        coupled: CoupledWorkers = 0,
        chunked_prefill: ChunkedPrefill = None,
        prefix_cache: PrefixCache = None,
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
        """Simulate every combination of policies, speeds and seeds, in parallel; goes on where it was interrupted."""
        opened(trace, format_name, strict=False, block_tokens=block_tokens)
        profile = self._cluster(cluster, chunked_prefill, prefix_cache)
        source = TraceSource(trace, format_name, block_tokens, limit)
        try:
            config = SchedulerConfig(
                block_tokens=profile.block_tokens,
                admission=admission,
                slo=SLO(slo_ttft, slo_tbt),
                allow_pull=pulls,
            )
            base = SimulationOptions(profile, *pools(prefill, decode, coupled), scheduler=config, event_lag_s=event_lag)
            chosen = {name: self._load_policy(name) for name in listed(policies, "policies", str)}
            cells = cells_of(source, base, chosen, listed(speeds, "speeds", float), listed(seeds, "seeds", int))
        except ValueError as error:
            raise fail(str(error)) from error
        run_comparison(cells, directory, ray_address, json_target)


def experiment(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(EXPERIMENTS)}.", metavar="NAME")],
    trace: Annotated[
        Path | None, typer.Argument(help="Trace file; else the experiment's workload is generated.", metavar="[TRACE]")
    ] = None,
    limit: Limit = None,
    json_target: JsonTarget = None,
) -> None:
    """Repeat an experiment of a paper: its figures beside ours, and which of its claims hold."""
    if name not in EXPERIMENTS:
        raise fail(f"experiment is {name!r}; allowed: {', '.join(EXPERIMENTS)}")
    source = None if trace is None else opened(trace, None, strict=False, limit=limit)
    raise typer.Exit(run_experiment(EXPERIMENTS[name], source, limit, json_target))


def listed(text: str, name: str, kind: Callable[[str], T]) -> list[T]:
    """The values of a comma-separated option. Raises ValueError naming the option."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"{name} is {text!r}; allowed: at least one value, with commas between several")
    try:
        return [kind(part) for part in parts]
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}; allowed: comma-separated values ({error})") from error


def pools(prefill: int | None, decode: int | None, coupled: int) -> tuple[int, int, int]:
    """Workers to prefill, to decode, and to do both. Coupled workers alone, unless others are asked for too."""
    default = 0 if coupled else DEFAULT_WORKERS
    return (default if prefill is None else prefill, default if decode is None else decode, coupled)


def outage(text: str) -> Outage:
    """`prefill-001@60` or `prefill-001@60-90`, times in seconds. Raises ValueError naming the option."""
    found = OUTAGE.fullmatch(text)
    if found is None:
        raise ValueError(f"lose is {text!r}; allowed: WORKER@AT or WORKER@AT-BACK, as prefill-001@60-90, times in seconds")
    worker, lost_s, back_s = found.groups()
    return Outage(worker, float(lost_s), None if back_s is None else float(back_s))
