"""Commands on live workers: drain one of a running cluster, measure one, and demonstrations on a cluster of their own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from conductor.cli import AsJson, ConfigFile, ExitCode, fail, load_config, progress_since

if TYPE_CHECKING:
    from conductor.demo import Migration, Phase

demo_app = typer.Typer(no_args_is_help=True)
POLL_S = 0.5


def register(app: typer.Typer) -> None:
    app.command()(drain)
    app.command()(profile)
    app.add_typer(demo_app, name="demo")


def drain(
    worker: Annotated[str, typer.Argument(help="Worker to drain, for instance prefill-0.", metavar="WORKER")],
    config: ConfigFile = None,
    address: Annotated[str, typer.Option(help="Ray cluster that it belongs to.")] = "auto",
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait until it has stopped.")] = 600.0,
) -> None:
    """Give a worker no new work, copy what is worth keeping, let it finish, and stop it for good."""
    from time import monotonic, sleep

    from conductor.connection import ClusterError, connect, find_conductor

    section = load_config(config, {"cluster.address": address}).config.cluster
    progress, deadline_s = progress_since(monotonic()), monotonic() + timeout_s
    try:
        connect(section, 0, {})
        conductor = find_conductor(section)
    except ClusterError as error:
        raise fail(str(error), ExitCode.UNREACHABLE) from None
    import ray

    try:
        ray.get(conductor.drain_worker.remote(worker))
        progress(f"{worker} gets no new work")
        while not ray.get(conductor.retired.remote(worker)):
            if monotonic() > deadline_s:
                raise fail(f"{worker} is still busy after {timeout_s:g} s; it goes on draining", ExitCode.FAILED)
            sleep(POLL_S)
        progress(f"{worker} has stopped")
    except KeyError:
        raise fail(f"worker {worker!r} is not known to this cluster", ExitCode.BAD_INPUT) from None
    finally:
        ray.shutdown()


def profile(
    config: ConfigFile = None,
    model: Annotated[str | None, typer.Option(help="Model name, .gguf file or Hugging Face folder.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, whatever is remembered.")] = False,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a cluster profile for `conductor simulate --cluster FILE`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast a worker prefills, decodes and moves KV on this machine; about half a minute the first time."""
    from time import monotonic

    from conductor.cluster import profile_worker
    from conductor.connection import ClusterError
    from models.errors import ModelError
    from models.folder import load_card

    loaded = load_config(config, {"model.name": model}).config
    if cluster is not None and not cluster.parent.is_dir():
        raise fail(f"--cluster {cluster} is not allowed: {cluster.parent} is not a directory", ExitCode.BAD_INPUT)
    progress_since(monotonic())(f"measuring {loaded.model.name} with {loaded.workers.threads} threads, or remembering it")
    try:
        load_card(loaded.model.name)
        fitted = profile_worker(loaded, fresh=fresh)
    except ModelError as error:
        raise fail(str(error), ExitCode.BAD_INPUT) from None
    except ClusterError as error:
        raise fail(str(error), ExitCode.FAILED) from None
    if cluster is not None:
        _write_cluster(cluster, fitted["profile"], f"{loaded.model.name} as measured by `conductor profile`")
    if as_json:
        typer.echo(json.dumps(fitted, indent=2))
    else:
        _show_profile(fitted)


def _write_cluster(file: Path, fitted: dict[str, Any], description: str) -> None:
    import yaml

    from traces.clusters.measured import cluster_of
    from traces.clusters.profile import load_profile

    described = cluster_of(load_profile("smollm2-cpu"), fitted, description)
    try:
        file.write_text(yaml.safe_dump(described.model_dump(mode="json", exclude_none=True), sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise fail(f"{file} cannot be written: {error.strerror}", ExitCode.FAILED) from None


def _show_profile(fitted: dict[str, Any]) -> None:
    table = Table("coefficient", "value", box=None)
    for name, value in fitted["profile"].items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            table.add_row(name, f"{value:.4g}")
    for kind in ("prefill", "decode"):
        table.add_row(f"{kind} error, mean", f"{fitted[f'{kind}_quality']['mean_abs_error']:.1%}")
    Console(width=None if sys.stdout.isatty() else 160).print(table)


@demo_app.callback()
def demo() -> None:
    """Demonstrations on a live cluster of this machine."""


@demo_app.command("migration")
def demo_migration(
    config: ConfigFile = None,
    prefixes: Annotated[int, typer.Option(min=1, help="Prefixes that go hot, one after the other.")] = 4,
    prefix_tokens: Annotated[int, typer.Option(min=128, help="Tokens of each.")] = 1024,
    as_json: AsJson = False,
) -> None:
    """Copy hot prefixes ahead of demand, and compute again where a link is too slow to pull; a few minutes."""
    from time import monotonic

    from conductor.connection import ClusterError
    from conductor.demo import DemoFailed, Load, migration
    from models.errors import ModelError

    load = Load(prefixes=prefixes, prefix_tokens=prefix_tokens)
    try:
        shown = asyncio.run(migration(load_config(config).config, load, progress_since(monotonic())))
    except (ClusterError, DemoFailed, ModelError) as error:
        raise fail(str(error), ExitCode.FAILED) from None
    if as_json:
        typer.echo(json.dumps(_summary(shown), indent=2))
    else:
        _show(shown)
    for problem in shown.problems():
        raise fail(problem, ExitCode.FAILED)


def _summary(shown: Migration) -> dict[str, Any]:
    return {
        "phases": [_phase(phase) for phase in (shown.demand, shown.ahead, shown.slow)],
        "computed_again": shown.slow.elsewhere(),
        "problems": shown.problems(),
    }


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "phase": phase.name,
        "link_gbps": phase.link_gbps,
        "copied_blocks": phase.copied_blocks,
        "pulls": phase.pulls,
        "computed_again": len(phase.elsewhere()),
        "ttft_p90_s": phase.p90_s,
    }


def _show(shown: Migration) -> None:
    console = Console()
    rows = [_phase(phase) for phase in (shown.demand, shown.ahead, shown.slow)]
    table = Table(*rows[0], title="hot prefixes, with their holder busy")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)
    for record in shown.slow.elsewhere():
        chosen = next(row for row in record["candidates"] if row["chosen"])
        console.print(
            f"{record['request_id']}: {chosen['worker']} computed {chosen['pull_tokens']} tokens again in "
            f"{chosen['prefill_s']:.1f} s, for pulling them would have taken {chosen['pull_s']:.1f} s",
            highlight=False,
        )
