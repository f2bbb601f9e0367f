"""The command line of the trace tools: `conductor replay` and `conductor trace ...`. Flags in, calls out; no logic."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from conductor.core.types import SLO
from traces.console import bad_input, fail, remark_on_reading
from traces.formats import FORMATS, Trace, open_trace
from traces.generate import WORKLOADS, generate
from traces.replay import LiveOptions
from traces.replay_command import ReportTargets, run_replay
from traces.report import STANDARD_OUTPUT
from traces.reuse import EVICTION_RANKS
from traces.schema import MOONCAKE_BLOCK_TOKENS
from traces.stats import DEFAULT_CAPACITIES_BLOCKS, StatsOptions
from traces.synthesize import TokenRange
from traces.trace_commands import run_fetch, run_stats, run_write

DEFAULT_CAPACITIES = ",".join(str(blocks) for blocks in DEFAULT_CAPACITIES_BLOCKS)

trace_app = typer.Typer(help="Look at, make, convert and fetch traces.", no_args_is_help=True)

TracePath = Annotated[Path, typer.Argument(help="Trace file; plain, gzip or zstd.", metavar="TRACE")]
FormatName = Annotated[
    str | None, typer.Option("--format", help=f"Format of the file, else told by its columns: {', '.join(FORMATS)}.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first faulty row instead of counting and skipping it.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Take the first N requests only.")]
BlockTokens = Annotated[int | None, typer.Option(min=1, help="Tokens that one id of hash_ids stands for, if not the format's.")]


def writable(option: typer.CallbackParam, target: str | Path | None) -> str | Path | None:
    """`target`, once it is known to be a file that can be written: a run may take minutes before it is."""
    path = Path(target or STANDARD_OUTPUT)
    if str(path) == STANDARD_OUTPUT or (os.access(path.parent, os.W_OK) and not path.is_dir()):
        return target
    raise fail(f"{option.opts[0]} is '{path}'; allowed: a file in a folder that exists and can be written to")


JsonTarget = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write figures as JSON; - for standard output.", callback=writable),
]
HtmlTarget = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained HTML report.", callback=writable)
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the `conductor` application."""
    app.add_typer(trace_app, name="trace")
    app.command("replay")(replay)


@trace_app.command()
def stats(
    trace: TracePath,
    capacity: Annotated[str, typer.Option(metavar="N,N,...", help="Cache capacities in blocks.")] = DEFAULT_CAPACITIES,
    policies: Annotated[bool, typer.Option(help="Also LFU and length-aware eviction, at each capacity.")] = True,
    loss: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of hits that the retention window may lose.")] = 0.01,
    format_name: FormatName = None,
    strict: Strict = False,
    limit: Limit = None,
    block_tokens: BlockTokens = None,
    json_target: JsonTarget = None,
) -> None:
    """Lengths, arrivals, ideal hit ratio, exact LRU curve, reuse times."""
    source = opened(trace, format_name, strict=strict, limit=limit, block_tokens=block_tokens)
    with bad_input():
        options = StatsOptions(_capacities(capacity), tuple(EVICTION_RANKS) if policies else (), loss)
        run_stats(source, options, json_target)


@trace_app.command("generate")
def generate_trace(
    workload: Annotated[str, typer.Argument(help=f"One of {', '.join(WORKLOADS)}.", metavar="WORKLOAD")],
    output: Annotated[Path, typer.Argument(help="File to write, Mooncake JSONL; .gz or .zst compresses.", metavar="FILE")],
    requests: Annotated[int | None, typer.Option(min=1, help="How many; as many as published unless given.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same trace.")] = 0,
) -> None:
    """Make a trace that looks like a published one."""
    with bad_input():
        run_write(generate(workload, requests, seed), output, MOONCAKE_BLOCK_TOKENS)


@trace_app.command()
def convert(
    trace: TracePath,
    output: Annotated[Path, typer.Argument(help="File to write, Mooncake JSONL; .gz or .zst compresses.", metavar="FILE")],
    to_block_tokens: Annotated[int, typer.Option(min=1, help="Block of the result: a multiple of the source's.")] = 512,
    format_name: FormatName = None,
    strict: Strict = False,
    limit: Limit = None,
    block_tokens: BlockTokens = None,
) -> None:
    """Rewrite a trace of any known format as Mooncake JSONL."""
    source = opened(trace, format_name, strict=strict, limit=limit, block_tokens=block_tokens)
    with bad_input():
        run_write(source, output, to_block_tokens)
    remark_on_reading(source.report)


@trace_app.command("fetch")
def fetch_trace(
    url: Annotated[str, typer.Argument(help="Public http or https address.", metavar="URL")],
    output: Annotated[
        Path | None, typer.Argument(help="File to write, else the address's last part.", metavar="[FILE]")
    ] = None,
    sha256: Annotated[str | None, typer.Option(help="Checksum that the content must have.")] = None,
) -> None:
    """Download a trace; an interrupted download goes on where it stopped."""
    run_fetch(url, output, sha256)


def opened(
    path: Path, format_name: str | None, *, strict: bool, limit: int | None = None, block_tokens: int | None = None
) -> Trace:
    """The trace, or a line of error and the end of the command."""
    with bad_input():
        return open_trace(path, format_name=format_name, strict=strict, limit=limit, block_tokens=block_tokens)


def replay(
    trace: TracePath,
    url: Annotated[str, typer.Option(help="Root of an OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    limit: Limit = None,
    speed: Annotated[float, typer.Option(help="Times faster than the trace.")] = 1.0,
    scale: Annotated[float, typer.Option(help="Multiply lengths and blocks, to fit a small model.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight at most; else no limit.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Send the first K requests one by one, unmeasured.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds for one whole request.")] = 600.0,
    slo_ttft: Annotated[float | None, typer.Option(help="TTFT objective in seconds.")] = 30.0,
    slo_tbt: Annotated[float | None, typer.Option(help="TBT objective in seconds (mean of the longest 10 % of gaps).")] = 0.2,
    model: Annotated[str | None, typer.Option(help="Model name, else the server's first.")] = None,
    token_range: Annotated[str, typer.Option(metavar="LOW:HIGH", help="Token ids to draw prompts from.")] = "1000:30000",
    ignore_eos: Annotated[bool, typer.Option(help="Ask for outputs of the trace's length; off for servers without it.")] = True,
    send_slo: Annotated[bool, typer.Option(help="Tell the objectives to the server, for its admission.")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="CONDUCTOR_API_KEY", help="Sent as a bearer token.")] = None,
    format_name: FormatName = None,
    strict: Strict = False,
    block_tokens: BlockTokens = None,
    json_target: JsonTarget = None,
    html: HtmlTarget = None,
) -> None:
    """Replay a trace against an OpenAI-compatible endpoint, open loop, and report TTFT, TBT, hits and rejections."""
    source = opened(trace, format_name, strict=strict, limit=limit, block_tokens=block_tokens)
    with bad_input():
        options = LiveOptions(
            url=url,
            model=model,
            speed=speed,
            scale=scale,
            max_concurrency=max_concurrency,
            warmup=warmup,
            timeout_s=timeout,
            slo=SLO(slo_ttft, slo_tbt),
            tokens=_token_range(token_range),
            ignore_eos=ignore_eos,
            send_slo=send_slo,
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
        )
    raise typer.Exit(run_replay(source, options, ReportTargets(json_target, html)))


def _capacities(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"--capacity is {text!r}; allowed: whole numbers above 0 with commas between them")
    return tuple(int(word) for word in words)


def _token_range(text: str) -> TokenRange:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal()):
        raise ValueError(f"--token-range is {text!r}; allowed: LOW:HIGH, two whole numbers")
    return TokenRange(int(low), int(high))
