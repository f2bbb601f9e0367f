"""The `conductor` command: flags in, calls out. Everything heavy is imported by the command that needs it.

Results go to standard output, progress and errors to standard error. Exit codes: 0 done; 1 it failed while running; 2 bad
usage, configuration or input; 3 an address does not answer or cannot be served on; 130 stopped by a signal. The commands that
work on traces live in `traces/commands.py` and are mounted when one of them, or the list of commands, is asked for.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from conductor import __version__
from conductor.cache_cli import cache_app
from conductor.convert_cli import convert_app

if TYPE_CHECKING:
    from conductor.config import LoadedConfig


class ExitCode(IntEnum):
    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    UNREACHABLE = 3
    STOPPED = 130


app = typer.Typer(
    name="conductor", no_args_is_help=True, pretty_exceptions_show_locals=False, help="A global scheduler for LLM serving."
)
config_app = typer.Typer(no_args_is_help=True, help="Look at the configuration.")
model_app = typer.Typer(no_args_is_help=True, help="Fetch models and look at them.")
app.add_typer(config_app, name="config")
app.add_typer(model_app, name="model")
key_app = typer.Typer(no_args_is_help=True, help="API keys of the gateway.")
app.add_typer(convert_app, name="convert")
app.add_typer(key_app, name="key")
app.add_typer(cache_app, name="cache")

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML file; environment and flags override it.")
]
Url = Annotated[str, typer.Option(help="Where the gateway answers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def main() -> None:
    """Entry point. Mounts the trace commands unless a command that needs none of them is named."""
    from conductor import bench_cli, cluster_commands, usage

    bench_cli.register(app)
    cluster_commands.register(app)
    own = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    own |= {group.name for group in app.registered_groups} | {"--version"}
    if not own & set(sys.argv[1:2]):
        from conductor.flight_log import recording
        from conductor.policies_loader import load_policy
        from models.cache import cache_root
        from traces import commands, sim_commands

        commands.register(app)
        sim_commands.register(app, recording, cache_root() / "profiles", load_policy)
    sys.exit(usage.run(app))


def fail(message: str, code: ExitCode) -> typer.Exit:
    """Print one line of error and give the exception that ends the command."""
    Console(stderr=True).print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(code)


def progress_since(start_s: float) -> Callable[[str], None]:
    """Prints lines to standard error with the seconds since `start_s`."""
    console = Console(stderr=True)

    def progress(line: str) -> None:
        console.print(f"[{monotonic() - start_s:5.1f} s] {line}", markup=False, highlight=False, soft_wrap=True)

    return progress


def load_config(file: Path | None, flags: dict[str, Any] | None = None) -> LoadedConfig:
    """The configuration in force, or one line for each error and exit code 2."""
    from conductor.config import ConfigError, load

    try:
        return load(file, os.environ, flags)
    except ConfigError as error:
        raise fail(str(error), ExitCode.BAD_INPUT) from None


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def serve(
    config: ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name, .gguf file or Hugging Face folder.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    prefill_stages: Annotated[
        str | None, typer.Option(help="Actors that share each prefill worker's layers as a pipeline; 2,1 for two workers.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Placement policy.")] = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to join instead of starting one.")] = None,
    attach: Annotated[
        bool, typer.Option("--attach", help="Join the Conductor that runs there instead of starting one.")
    ] = False,
    flight_log: Annotated[Path | None, typer.Option(help="Directory for flight logs.")] = None,
) -> None:
    """Start a cluster and serve a model over the OpenAI API."""
    flags = {"gateway.host": host, "gateway.port": port, "model.name": model, "workers.prefill": prefill}
    flags |= {"workers.decode": decode, "scheduler.policy": policy, "cluster.address": address}
    flags |= {"cluster.attach": attach or None, "workers.prefill_stages": prefill_stages}
    flags |= {"flight_log.directory": None if flight_log is None else str(flight_log)}
    progress = progress_since(monotonic())
    loaded = load_config(config, flags)
    from conductor import serve as serving

    try:
        serving.serve(loaded.config, progress)
    except (serving.BindError, serving.NoAnswer) as error:
        raise fail(str(error), ExitCode.UNREACHABLE) from None
    except (serving.ConfigError, serving.ModelError) as error:
        raise fail(str(error), ExitCode.BAD_INPUT) from None
    except (serving.ServeError, serving.ClusterError) as error:
        raise fail(str(error), ExitCode.FAILED) from None
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise fail("stopped before it was ready", ExitCode.STOPPED) from None


@model_app.command("pull")
def model_pull() -> None:
    """Fetch the default model, verify it, and prepare it in the user's cache."""
    from models.errors import ModelError
    from models.folder import find_model
    from models.pull import DEFAULT_MODEL

    try:
        folder = find_model(DEFAULT_MODEL)
    except ModelError as error:
        raise fail(str(error), ExitCode.FAILED) from None
    typer.echo(f"{DEFAULT_MODEL} is ready in {folder.path}")


@model_app.command("show")
def model_show(
    name: Annotated[str, typer.Argument(help="Model name, .gguf file or Hugging Face folder.")] = "smollm2-135m",
    as_json: AsJson = False,
) -> None:
    """What a model is: revision, limits, bytes of KV."""
    from dataclasses import asdict

    from models.errors import ModelError
    from models.folder import load_card

    try:
        card = asdict(load_card(name))
    except ModelError as error:
        raise fail(str(error), ExitCode.BAD_INPUT) from None
    show_values(card, as_json)


@key_app.command("new")
def key_new(
    tenant: Annotated[str, typer.Option(help="Who the key is for: a name in the keys file.")], as_json: AsJson = False
) -> None:
    """Make a key: shown once, with the line that the keys file needs of it."""
    from conductor.gateway.keys import NAME_PATTERN, key_hash, new_key

    if not re.match(NAME_PATTERN, tenant):
        raise fail(f"tenant {tenant!r} is not allowed; allowed: 1 to 64 letters, digits, '_', '.' or '-'", ExitCode.BAD_INPUT)
    key = new_key()
    if as_json:
        typer.echo(json.dumps({"tenant": tenant, "key": key, "hash": key_hash(key)}))
        return
    typer.echo(key)
    typer.echo(f"The key is shown once. In the keys file, under tenants.{tenant}.keys:\n  - {key_hash(key)}", err=True)


@config_app.command("show")
def config_show(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Every value in force and where it came from."""
    settings = list(load_config(config).settings())
    if as_json:
        typer.echo(json.dumps({each.key: {"value": each.value, "source": each.source} for each in settings}, indent=2))
        return
    table = Table("key", "value", "source", box=None)
    for each in settings:
        table.add_row(each.key, json.dumps(each.value), each.source)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


@config_app.command("check")
def config_check(config: ConfigFile = None) -> None:
    """Whether the configuration can be used."""
    load_config(config)
    typer.echo("the configuration is valid")


@config_app.command("schema")
def config_schema() -> None:
    """JSON schema of the configuration file."""
    from conductor.config import Config

    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


@app.command()
def explain(
    request_id: Annotated[
        str, typer.Argument(help="Request id, as in the response header x-conductor-decision-id.", metavar="ID")
    ],
    url: Url = "http://127.0.0.1:8000",
    log: Annotated[Path | None, typer.Option(help="Read a flight log instead of asking a gateway.", metavar="LOG")] = None,
    as_json: AsJson = False,
) -> None:
    """Why a request was placed where it was, or refused, and what came of it. Where keys are asked for: CONDUCTOR_API_KEY."""
    from conductor.explain import render

    record = decision_from_gateway(request_id, url) if log is None else decision_from_log(request_id, log)
    if as_json:
        typer.echo(json.dumps(record, indent=2))
    else:
        render(record, Console(width=None if sys.stdout.isatty() else 160))


def decision_from_log(request_id: str, log: Path) -> Mapping[str, Any]:
    """The decision as a fresh scheduler makes it again from a flight log."""
    from conductor.core.config import SchedulerConfig
    from conductor.core.scheduler import Scheduler
    from conductor.flight_log import FlightLogError, read
    from conductor.policies_loader import PolicyError, load_policy

    try:
        header, records = read(log, SchedulerConfig)
        config = replace(header.scheduler, decision_records=sys.maxsize)
        scheduler = Scheduler(config, policy=load_policy(config.policy))
        for record in records:
            scheduler.handle(record.event, record.now)
    except (FlightLogError, PolicyError) as error:
        raise fail(str(error), ExitCode.BAD_INPUT) from None
    decision = scheduler.decision_record(request_id)
    if decision is None:
        raise fail(f"no decision with id {request_id!r} in {log}", ExitCode.BAD_INPUT)
    return decision


def decision_from_gateway(request_id: str, url: str) -> Mapping[str, Any]:
    import httpx

    key = os.environ.get("CONDUCTOR_API_KEY")
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/decisions/{request_id}", headers=headers, timeout=10)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise fail(f"{url} does not answer: {error}", ExitCode.UNREACHABLE) from None
    if answer.status_code == httpx.codes.NOT_FOUND:
        raise fail(f"no decision with id {request_id!r} at {url}", ExitCode.BAD_INPUT)
    if answer.is_error:
        raise fail(f"{url} answered {answer.status_code}: {answer.text}", ExitCode.FAILED)
    record: Mapping[str, Any] = answer.json()
    return record


@app.command()
def verify(
    log: Annotated[Path, typer.Argument(help="First segment of a flight log.", metavar="LOG")], as_json: AsJson = False
) -> None:
    """Replay a flight log into a fresh scheduler and compare every command."""
    from conductor.core.config import SchedulerConfig
    from conductor.core.scheduler import Scheduler
    from conductor.flight_log import FlightLogError, verify

    try:
        outcome = verify(log, SchedulerConfig, Scheduler)
    except FlightLogError as error:
        raise fail(str(error), ExitCode.BAD_INPUT) from None
    if as_json:
        typer.echo(json.dumps({"records": outcome.records, "difference": outcome.difference and str(outcome.difference)}))
    elif outcome.difference is None:
        typer.echo(f"{outcome.records} records: identical commands")
    if outcome.difference is not None:
        raise fail(str(outcome.difference), ExitCode.FAILED)


@app.command()
def counterfactual(
    log: Annotated[Path, typer.Argument(help="First segment of a flight log.", metavar="LOG")],
    policy: Annotated[str, typer.Option(help="Placement policy to try instead.")],
    admission: Annotated[str | None, typer.Option(help="Admission policy to try instead.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Ground truth: a cluster profile, not the log's own workers.")] = None,
    as_json: AsJson = False,
) -> None:
    """What another policy would have made of a flight log's arrivals, request by request and in total."""
    from conductor.core.config import SchedulerConfig
    from conductor.flight_log import FlightLogError, read
    from conductor.policies_loader import load_policy
    from traces import counterfactual, counterfactual_command
    from traces.clusters.profile import load_profile

    try:
        header, records = read(log, SchedulerConfig)
        other = replace(header.scheduler, policy=policy, admission=admission or header.scheduler.admission)
        truth = None if cluster is None else load_profile(cluster)
        differences = counterfactual.compare(counterfactual.read_flight(records), header.scheduler, other, load_policy, truth)
    except (FlightLogError, ValueError) as error:
        raise fail(str(error), ExitCode.BAD_INPUT) from None
    if as_json:
        typer.echo(json.dumps(counterfactual_command.as_json(differences), indent=2))
    else:
        counterfactual_command.show(differences, Console(width=None if sys.stdout.isatty() else 140))


@app.command()
def doctor(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Look at what serving needs: versions, memory, port, model, Ray."""
    from conductor.doctor import examine

    findings = examine(load_config(config).config)
    if as_json:
        typer.echo(json.dumps([{"check": f.check, "ok": f.ok, "found": f.found} for f in findings], indent=2))
    else:
        for finding in findings:
            typer.echo(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.check}: {finding.found}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def top(
    url: Url = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one picture as JSON and end.")] = False,
) -> None:
    """Watch a gateway and its cluster. Where keys are asked for: the admin port, and the key in CONDUCTOR_OPERATOR_KEY."""
    from conductor import top as watching

    key = os.environ.get("CONDUCTOR_OPERATOR_KEY")
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        if as_json:
            typer.echo(json.dumps(next(watching.pictures(url, key)), indent=2))
        elif once:
            console.print(watching.render(next(watching.pictures(url, key)), None))
        else:
            watching.watch(url, key, console)
    except watching.WatchError as error:
        raise fail(str(error), ExitCode.FAILED if error.refused else ExitCode.UNREACHABLE) from None
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.DONE) from None


def show_values(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(values, indent=2))
        return
    for name, value in values.items():
        typer.echo(f"{name}: {value}")
