"""`conductor top`: what the dashboard shows, in a terminal.

Reads the same events as the page does and draws each picture anew: state and rates, workers, the last decisions with the three
terms of the chosen candidate, hot prefixes, and what was refused. A stream that breaks off is opened again until the user
stops; only a first connection that fails ends the command.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import httpx
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

Picture: TypeAlias = Mapping[str, Any]
EVENTS_PATH = "/dashboard/events"
TERMS = {"queue": "yellow", "transfer": "magenta", "prefill": "cyan"}
BAR_CELLS = 24
DECISIONS = 12
PREFIXES = 6
RETRY_S = 1.0
SILENCE_S = 30.0


class WatchError(Exception):
    """The events cannot be had; the message is one line for people. `refused` tells that somebody answered."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


def pictures(url: str, key: str | None) -> Iterator[Picture]:
    """The pictures of one stream until it ends. Raises `WatchError`."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        with httpx.stream("GET", url.rstrip("/") + EVENTS_PATH, headers=headers, timeout=SILENCE_S) as answer:
            if answer.status_code != httpx.codes.OK:
                raise WatchError(_refusal(url, answer.status_code), refused=True)
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise WatchError(f"{url} does not answer: {error}", refused=False) from None


def _refusal(url: str, status: int) -> str:
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.NOT_FOUND):
        return f"{url} answered {status}; where keys are asked for, give the admin port and the operator's key"
    return f"{url} answered {status}"


def watch(url: str, key: str | None, console: Console) -> None:
    """Draw every picture until the user stops. Raises `WatchError` when the first one cannot be had."""
    before: Picture | None = None
    with Live(console=console, screen=console.is_terminal, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            problem = "the stream ended"
            try:
                for picture in pictures(url, key):
                    live.update(render(picture, before), refresh=True)
                    before = picture
            except WatchError as error:
                if before is None:
                    raise
                problem = str(error)
            if before is not None:
                lost = Text(f"connection lost, trying again: {problem}", style="bold red")
                live.update(Group(lost, render(before, None)), refresh=True)
            time.sleep(RETRY_S)


def render(picture: Picture, before: Picture | None) -> RenderableType:
    """One screen. Rates need the picture before this one."""
    overview = picture["overview"] or {}
    parts: list[RenderableType] = [_header(picture, overview), _figures(picture, before, overview)]
    parts.append(_workers(picture["workers"], overview.get("workers", {})))
    if overview.get("decisions"):
        parts.append(_decisions(overview["decisions"][:DECISIONS]))
    below = [_prefixes(overview["hot_prefixes"][:PREFIXES])] if overview.get("hot_prefixes") else []
    refused = {**overview.get("rejections", {}), **picture["gateway"]["rejections"]}
    below += [_counts("refused", refused)] if refused else []
    return Group(*parts, Columns(below, padding=(0, 4)))


def _header(picture: Picture, overview: Mapping[str, Any]) -> Text:
    text = Text("Conductor  ", style="bold")
    state = ("ready", "bold green") if picture["ready"] else (f"not ready: {picture['reason']}", "bold red")
    text.append(*state)
    text.append(f"  {picture['model']}", style="dim")
    if overview:
        text.append(f"  policy {overview['policy']}, admission {overview['admission']}", style="dim")
    return text


def _figures(picture: Picture, before: Picture | None, overview: Mapping[str, Any]) -> RenderableType:
    gateway, objectives = picture["gateway"], overview.get("objectives", {})
    judged = sum(objectives.get(kind, 0) for kind in ("met", "missed_ttft", "missed_tbt"))
    workers = overview.get("workers", {}).values()
    prompt = sum(worker["prompt_tokens"] for worker in workers)
    reused = sum(worker["reused_tokens"] for worker in workers)
    values = {
        "in flight": f"{gateway['in_flight']:,}",
        "waiting": f"{gateway['waiting_for_turn'] + gateway['waiting_for_first_token']:,}",
        "output": _rate(picture, before),
        "from cache": _share(reused, prompt),
        "objectives met": _share(objectives.get("met", 0), judged),
    }
    return Columns([Panel(Text(value, style="bold"), title=name) for name, value in values.items()])


def _rate(picture: Picture, before: Picture | None) -> str:
    if before is None:
        return "-"
    tokens = picture["gateway"]["output_tokens"] - before["gateway"]["output_tokens"]
    return f"{max(0.0, tokens) / picture['period_s']:,.0f} tokens/s"


def _workers(workers: Mapping[str, Mapping[str, Any]], seen: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table("worker", "role", "node", "queue", "batch", "cache", "hits", title="Workers")
    for name, worker in sorted(workers.items(), key=lambda item: (item[1].get("role") == "decode", item[0])):
        figures = seen.get(name, {})
        state = " draining" if worker.get("draining") else ""
        table.add_row(
            f"{name}{state}",
            str(worker.get("role", "")),
            str(worker.get("node", "")),
            _seconds(worker.get("prefill_queue_s")),
            str(worker.get("decode_requests", worker.get("prefill_jobs", "-"))),
            ", ".join(_tier(name, tier) for name, tier in figures.get("tiers", {}).items()),
            _share(figures.get("reused_tokens", 0), figures.get("prompt_tokens", 0)),
        )
    return table


def _tier(name: str, tier: Mapping[str, Any]) -> str:
    return f"{name} {_share(tier['blocks'], tier['capacity'])}"


def _decisions(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("request", "ago", "tokens", "to", "estimate", "took", "queue | transfer | prefill", title="Decisions")
    longest = max((_total(_chosen(row)) for row in rows), default=0.0)
    for row in rows:
        where = f"{row['prefill']} > {row['decode'] or '?'}" if row["decision"] == "placed" else row["rejection"]["reason"]
        table.add_row(
            row["request_id"],
            f"{row['ago_s']:.0f} s",
            f"{row['prompt_tokens']:,}",
            Text(where, style="" if row["decision"] == "placed" else "red"),
            _seconds(row["ttft"]["total_s"]) if "ttft" in row else "-",
            _seconds(row["actual"]["ttft_s"]),
            _bar(_chosen(row), longest),
        )
    return table


def _chosen(row: Mapping[str, Any]) -> Mapping[str, Any]:
    candidates = row.get("candidates", ())
    return next((each for each in candidates if each["chosen"]), candidates[0] if candidates else {})


def _total(candidate: Mapping[str, Any]) -> float:
    return sum(candidate.get(f"{term}_s") or 0.0 for term in TERMS)


def _bar(candidate: Mapping[str, Any], longest: float) -> Text:
    text, drawn, upto = Text(), 0, 0.0
    for term, colour in TERMS.items():
        upto += candidate.get(f"{term}_s") or 0.0
        cells = round(BAR_CELLS * upto / longest) if longest > 0 else 0
        text.append("█" * (cells - drawn), style=colour)
        drawn = cells
    return text


def _prefixes(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("prefix", "tokens", "hits", "replicas", title="Hot prefixes")
    for row in rows:
        table.add_row(row["prefix"], f"{row['tokens']:,}", f"{row['hits']:,}", ", ".join(row["replicas"]) or "evicted")
    return table


def _counts(title: str, counts: Mapping[str, float]) -> Table:
    table = _table("reason", "count", title=title.capitalize())
    for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(name, f"{count:,.0f}")
    return table


def _table(*columns: str, title: str) -> Table:
    return Table(*columns, title=title, title_justify="left", title_style="bold", box=None, header_style="dim")


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{value:.2f} s"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
