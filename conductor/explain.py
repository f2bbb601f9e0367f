"""A decision record for people: every candidate with its three terms, the choice, and what happened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def render(record: Mapping[str, Any], console: Console) -> None:
    """Print a decision record. Lists of objects become tables, everything else a line."""
    for name, value in record.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            console.print(_table(name, value))
        else:
            console.print(f"{name}: {_text(value)}", markup=False, highlight=False)


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    flat = [_flatten(row) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    table = Table(*columns, title=title, title_justify="left", box=None)
    for row in flat:
        table.add_row(*(_text(row.get(name)) for name in columns))
    return table


def _flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
