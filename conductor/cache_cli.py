"""`conductor cache`: look at the KV that a running cluster, or a store directory, holds; pin, drop and verify it.

A running cluster is asked at its admin port with the operator's key from `CONDUCTOR_OPERATOR_KEY`. A directory is read as it
lies there, whoever wrote it and whether or not somebody has it open; pinning and dropping need the cluster.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

OPERATOR_KEY = "CONDUCTOR_OPERATOR_KEY"
FAILED, BAD_INPUT, UNREACHABLE = 1, 2, 3
TIMEOUT_S = 600.0

cache_app = typer.Typer(no_args_is_help=True, help="Look at cached KV; pin, drop and verify it.")

Url = Annotated[str | None, typer.Option(help="Admin address of a running gateway; the key is in CONDUCTOR_OPERATOR_KEY.")]
Directory = Annotated[Path | None, typer.Option(help="A store directory to read as it lies there.", metavar="DIR")]
Hash = Annotated[
    str, typer.Argument(help="Hash of the prefix's last block, as `conductor cache ls` prints it.", metavar="HASH")
]
OptionalHash = Annotated[
    str | None, typer.Argument(help="Hash of a prefix's last block; everything if left out.", metavar="[HASH]")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@cache_app.command("ls")
def ls(hash_: OptionalHash = None, url: Url = None, directory: Directory = None, as_json: AsJson = False) -> None:
    """Prefixes, latest use first; with a hash, the blocks that lead to it."""
    if chosen(url, directory) is not None:
        rows = offline_prefixes(directory_of(directory), hash_)
        show(rows, ("hash", "blocks", "class", "stored", "pinned"), as_json)
        return
    answer = ask(url, "GET", "/ls", {} if hash_ is None else {"hash": hash_})
    rows = [
        {"worker": worker, "tier": tier, **prefix, "last_used": age(prefix["last_used_s"])}
        for worker, tier, prefixes in per_tier(answer)
        for prefix in prefixes
    ]
    show(rows, ("worker", "tier", "hash", "blocks", "class", "last_used", "pinned"), as_json)


@cache_app.command("stats")
def stats(url: Url = None, directory: Directory = None, as_json: AsJson = False) -> None:
    """Blocks, bytes, hits, evictions, damage and failures of every tier."""
    if chosen(url, directory) is not None:
        show(offline_stats(directory_of(directory)), ("format", "blocks", "bytes", "pinned", "damaged"), as_json)
        return
    counts = ("blocks", "capacity_blocks", "used_bytes", "stored", "evicted", "hits", "misses", "quarantined", "pinned")
    columns = ("worker", "tier", *counts, "dropped", "waiting", "failure")
    rows = [{**numbers, "worker": worker, "tier": tier} for worker, tier, numbers in per_tier(ask(url, "GET", "", {}))]
    show(rows, columns, as_json)


@cache_app.command("pin")
def pin(
    hash_: Hash,
    url: Url = None,
    remove: Annotated[bool, typer.Option(help="Take the pin back.")] = False,
    as_json: AsJson = False,
) -> None:
    """Keep a prefix, with all blocks that lead to it, until it is unpinned."""
    show_counts(ask(url, "POST", "/unpin" if remove else "/pin", {"hash": hash_}), as_json)


@cache_app.command("drop")
def drop(hash_: OptionalHash = None, url: Url = None, as_json: AsJson = False) -> None:
    """Forget a prefix with everything that follows it, except what is pinned."""
    show_counts(ask(url, "POST", "/drop", {} if hash_ is None else {"hash": hash_}), as_json)


@cache_app.command("verify")
def verify(hash_: OptionalHash = None, url: Url = None, directory: Directory = None, as_json: AsJson = False) -> None:
    """Read blocks and check them; exit code 1 when one is damaged."""
    if chosen(url, directory) is not None:
        if hash_ is not None:
            raise failed("a directory is verified as a whole; give no hash", BAD_INPUT)
        blocks = offline_blocks(directory_of(directory), payloads=True)
        rows = [row for row in blocks if row["damage"]]
        show(rows, ("hash", "damage", "path"), as_json)
        damaged = len(rows)
        Console(stderr=True).print(f"{damaged} of {len(blocks)} blocks are damaged", highlight=False)
    else:
        answer = ask(url, "POST", "/verify", {} if hash_ is None else {"hash": hash_})
        rows = [{**counts, "worker": worker, "tier": tier} for worker, tier, counts in per_tier(answer)]
        show(rows, ("worker", "tier", "checked", "damaged"), as_json)
        damaged = sum(row["damaged"] for row in rows)
    if damaged:
        raise typer.Exit(FAILED)


# --- a running cluster ------------------------------------------------------------------------------------------------


def ask(url: str | None, method: str, path: str, values: Mapping[str, str]) -> Mapping[str, Any]:
    """What every worker answers."""
    import httpx

    if url is None:
        raise failed("neither --url nor --directory is given; --url is the admin address of a gateway", BAD_INPUT)
    key = os.environ.get(OPERATOR_KEY)
    if key is None:
        raise failed(f"{OPERATOR_KEY} is not set; it must be the operator's key", BAD_INPUT)
    where = {"params": values} if method == "GET" else {"json": values}
    try:
        answer = httpx.request(
            method,
            f"{url.rstrip('/')}/admin/cache{path}",
            headers={"authorization": f"Bearer {key}"},
            timeout=TIMEOUT_S,
            **where,  # type: ignore[arg-type]
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise failed(f"{url} does not answer: {error}", UNREACHABLE) from None
    if answer.is_error:
        code = BAD_INPUT if answer.is_client_error else FAILED
        raise failed(f"{url} answered {answer.status_code}: {answer.text}", code)
    workers: Mapping[str, Any] = answer.json()["workers"]
    return workers


def per_tier(workers: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """(worker, tier, answer), and a line on standard error for each worker that gave none."""
    for worker, tiers in workers.items():
        if "error" in tiers:
            Console(stderr=True).print(f"{worker}: {tiers['error']}", markup=False, highlight=False)
    return [(w, tier, answer) for w, tiers in workers.items() if "error" not in tiers for tier, answer in tiers.items()]


def show_counts(workers: Mapping[str, Any], as_json: bool) -> None:
    rows = [{"worker": worker, "tier": tier, "blocks": count} for worker, tier, count in per_tier(workers)]
    show(rows, ("worker", "tier", "blocks"), as_json)


# --- a directory ------------------------------------------------------------------------------------------------------


def chosen(url: str | None, directory: Path | None) -> Path | None:
    """The directory, if that is what is asked for."""
    if url is not None and directory is not None:
        raise failed("--url and --directory exclude each other", BAD_INPUT)
    return directory


def directory_of(directory: Path | None) -> Path:
    if directory is None or not directory.is_dir():
        raise failed(f"{directory} is not a directory", BAD_INPUT)
    return directory


def offline_blocks(directory: Path, *, payloads: bool) -> list[dict[str, Any]]:
    from conductor.cluster import stored_blocks

    return [
        {**asdict(block), "path": str(block.path), "hash": None if block.name is None else f"{block.name:032x}"}
        for block in stored_blocks(directory, payloads=payloads)
    ]


def offline_prefixes(directory: Path, hash_: str | None) -> list[dict[str, Any]]:
    """The ends of what lies there, or the chain to one block, as their headers tell."""
    blocks = {block["name"]: block for block in offline_blocks(directory, payloads=False) if block["name"] is not None}
    inner = {block["parent"] for block in blocks.values()}
    ends: Iterable[int] = [name for name in blocks if name not in inner]
    if hash_ is not None:
        ends = chain(hash_of(hash_), blocks)
    rows = [
        {
            "hash": blocks[name]["hash"],
            "blocks": len(chain(name, blocks)),
            "class": blocks[name]["traffic_class"],
            "stored": age(blocks[name]["stored_s"]),
            "stored_s": blocks[name]["stored_s"],
            "pinned": blocks[name]["pinned"],
        }
        for name in ends
    ]
    return sorted(rows, key=lambda row: -row["stored_s"]) if hash_ is None else rows


def hash_of(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        raise failed(f"hash {text!r} is not allowed; allowed: hexadecimal digits", BAD_INPUT) from None


def chain(name: int | None, blocks: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """The blocks from a root to `name`."""
    found: list[int] = []
    while name is not None and name in blocks:
        found.append(name)
        name = blocks[name]["parent"]
    return found[::-1]


def offline_stats(directory: Path) -> list[dict[str, Any]]:
    by_format: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for block in offline_blocks(directory, payloads=False):
        by_format[block["format"]].append(block)
    return [
        {
            "format": name,
            "blocks": len({block["name"] for block in blocks if block["name"] is not None}),
            "bytes": sum(block["nbytes"] for block in blocks),
            "pinned": len({block["name"] for block in blocks if block["pinned"]}),
            "damaged": sum(block["damage"] is not None for block in blocks),
        }
        for name, blocks in sorted(by_format.items())
    ]


# --- printing ---------------------------------------------------------------------------------------------------------


def age(at_s: float) -> str:
    return f"{max(0.0, time.time() - at_s):.0f} s ago"


def show(rows: Iterable[Mapping[str, Any]], columns: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([{name: row[name] for name in columns if name in row} for row in rows], indent=2))
        return
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*("" if row.get(name) is None else str(row[name]) for name in columns))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def failed(message: str, code: int) -> typer.Exit:
    Console(stderr=True).print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(code)
