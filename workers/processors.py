"""The processors that a worker's actor runs on, where the configuration names them.

Named as `0-3,8` (processors) or as `numa:1` (those of a memory node). The whole process is bound, not the computing alone:
memory comes from the node of whoever touches it first, so weights and KV lie where they are computed with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

NODES = Path("/sys/devices/system/node")
_THREADS = Path("/proc/self/task")
_NODE = re.compile(r"numa:(\d{1,5})")
_LIST = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*")
_FORMS = "processors, as 0-3,8, or a memory node, as numa:1"


def check_processors(name: str) -> None:
    """Raises `ValueError` for what names neither processors nor a memory node."""
    if not _NODE.fullmatch(name) and not (_LIST.fullmatch(name) and _listed(name)):
        raise ValueError(f"cpus is {name!r}; allowed: {_FORMS}")


def processors_of(name: str, nodes: Path = NODES) -> set[int]:
    """The processors that a name means here. Raises `ValueError` for those that this process may not use."""
    check_processors(name)
    usable = os.sched_getaffinity(0)
    node = _NODE.fullmatch(name)
    if node is None:
        chosen = _listed(name)
        if not chosen <= usable:
            raise ValueError(f"cpus is {name!r}; allowed on this machine: {_ranges(usable)}")
        return chosen
    known = {int(path.name[4:]): _listed((path / "cpulist").read_text().strip()) & usable for path in nodes.glob("node[0-9]*")}
    chosen = known.get(int(node[1]), set())
    if not chosen:
        names = ", ".join(f"numa:{number}" for number, processors in sorted(known.items()) if processors)
        raise ValueError(f"cpus is {name!r}; allowed on this machine: {names or 'no memory node is known'}")
    return chosen


def processors_for(name: str, threads: int) -> set[int]:
    """The same, as a worker takes them. Raises `ValueError` also for fewer than the `threads` that compute."""
    chosen = processors_of(name)
    if len(chosen) < threads:
        raise ValueError(f"cpus is {name!r}, which is {len(chosen)} here, and threads is {threads}; allowed: at least as many")
    return chosen


def bind_process(name: str, threads: int) -> None:
    """Run every thread of this process, and those that they start, on the processors of that name. Raises `ValueError`."""
    chosen = processors_for(name, threads)
    for thread in _THREADS.iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), chosen)


def _listed(text: str) -> set[int]:
    """`0-3,8` as numbers; of an empty text, as of a node without processors, none."""
    bounds = [part.partition("-") for part in text.split(",") if part]
    return {number for first, _, last in bounds for number in range(int(first), int(last or first) + 1)}


def _ranges(processors: Iterable[int]) -> str:
    """The inverse of `_listed`."""
    runs: list[list[int]] = []
    for number in sorted(processors):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
