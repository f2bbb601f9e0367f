"""Spreads the cells of a comparison over Ray: on this machine, or on a cluster by its address. The only part of `traces` that
knows Ray, and imported only when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from traces.compare import Cell, Summary, simulate_cell


def run_on_ray(cells: Sequence[Cell], address: str | None) -> Iterator[tuple[int, Summary]]:
    """Simulate `cells` as Ray tasks, yielding them as they end. Without an address, given or in the environment (every Ray job
    has it there), Ray starts here and stops afterwards.

    Raises ConnectionError when no cluster answers at `address`.
    """
    if not cells:
        return
    import ray

    ours = not ray.is_initialized()
    if ours:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        ray.init(
            address=address or os.environ.get("RAY_ADDRESS") or "local",
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
    try:
        task = ray.remote(simulate_cell)
        numbers: dict[Any, int] = {task.remote(cell): number for number, cell in enumerate(cells)}
        while numbers:
            ended, _ = ray.wait(list(numbers), num_returns=1)
            yield numbers.pop(ended[0]), ray.get(ended[0])
    finally:
        if ours:
            ray.shutdown()
