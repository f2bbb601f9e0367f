"""Actors on processors of their own: what the names mean, what is refused, and which threads are bound."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from conductor.cluster import plan_workers
from conductor.cluster import profile_worker as cluster_profile
from conductor.config import load
from conductor.connection import ClusterError
from conductor.core.types import Role
from workers.assembly import build_parts, build_stage, profile_worker
from workers.config import WorkerConfig
from workers.processors import check_processors, processors_of

USABLE = {0, 1, 2, 3, 8, 9}


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of three memory nodes, one of them without processors, on which this process may use six."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(USABLE))
    for number, processors in enumerate(("0-3", "", "4-9")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{processors}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [("2", {2}), ("0-3,8", {0, 1, 2, 3, 8}), ("8-9,1", {1, 8, 9}), ("numa:0", {0, 1, 2, 3}), ("numa:2", {8, 9})],
)
def test_names_mean_processors_that_this_process_may_use(nodes: Path, name: str, expected: set[int]) -> None:
    assert processors_of(name, nodes) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("2-5", "cpus is '2-5'; allowed on this machine: 0-3,8-9"),
        ("numa:1", "cpus is 'numa:1'; allowed on this machine: numa:0, numa:2"),
        ("numa:7", "cpus is 'numa:7'; allowed on this machine: numa:0, numa:2"),
    ],
)
def test_what_this_machine_does_not_have_is_refused(nodes: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        processors_of(name, nodes)


@pytest.mark.parametrize("name", ["", "all", "3-1", "0,", "0 1", "numa:", "numa:0,1", "-1"])
def test_what_names_no_processors_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"cpus is '{name}'; allowed: processors, as 0-3,8, or a memory node, as numa:1"):
        check_processors(name)


BIND = """
import os, sys, threading
from workers.processors import bind_process

def affinity(into):
    into.append(os.sched_getaffinity(0))

name, go, earlier, later = sys.argv[1], threading.Event(), [], []
waiting = threading.Thread(target=lambda: (go.wait(), affinity(earlier)))
waiting.start()
bind_process(name, 1)
go.set()
starting = threading.Thread(target=affinity, args=(later,))
starting.start()
waiting.join(), starting.join()
assert earlier == later == [os.sched_getaffinity(0)] == [{int(name)}], (earlier, later)
try:
    bind_process(name, 2)
except ValueError as error:
    print(error)
"""


def test_every_thread_of_a_process_is_bound() -> None:
    """Those that ran before and those that start later; fewer processors than computing threads are refused."""
    last = str(max(os.sched_getaffinity(0)))
    done = subprocess.run([sys.executable, "-c", BIND, last], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"cpus is '{last}', which is 1 here, and threads is 2; allowed: at least as many"


def worker(*cpus: str) -> WorkerConfig:
    return WorkerConfig(worker_id="p0", role=Role.PREFILL, model="none", num_blocks=8, cpus=cpus, stages=len(cpus))


@pytest.mark.parametrize(
    ("build", "cpus"),
    [
        pytest.param(build_parts, ("99999",), id="worker"),
        pytest.param(partial(profile_worker, fresh=True), ("99999",), id="profile"),
        pytest.param(partial(build_stage, number=1), ("0", "99999"), id="later stage"),
    ],
)
def test_a_worker_takes_its_processors_before_anything_else(
    build: Callable[[WorkerConfig], object], cpus: tuple[str, ...]
) -> None:
    """Of each stage its own; before the model is even looked for."""
    with pytest.raises(ValueError, match="cpus is '99999'; allowed on this machine: "):
        build(worker(*cpus))


def test_stages_without_processors_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cpus is \['0'\] for 2 actors; allowed: none, or one for each"):
        replace(worker("0", "1"), cpus=("0",))


# --- from the configuration ----------------------------------------------------------------------------------------------


def test_actors_take_the_names_in_turn() -> None:
    """Prefill workers with all their stages first, then decode workers; unless asked for, nobody is bound."""
    flags = {"workers.prefill": 2, "workers.prefill_stages": [2, 1], "workers.decode": 2, "cluster.address": "ray.example:6379"}
    for given, expected in (
        (["numa:0", "numa:1"], [("numa:0", "numa:1"), ("numa:0",), ("numa:1",), ("numa:0",)]),
        ([0, "1,2", 3], [("0", "1,2"), ("3",), ("0",), ("1,2",)]),
        ("0-3", [("0-3", "0-3"), ("0-3",), ("0-3",), ("0-3",)]),
        ([], [(), (), (), ()]),
    ):
        config = load(None, None, {**flags, "workers.cpus": given}).config
        assert [plan.config.cpus for plan in plan_workers(config)] == expected
    assert load(None, {"CONDUCTOR__WORKERS__CPUS": "[numa:0, '0-3,8', 9]"}).config.workers.cpus == ("numa:0", "0-3,8", "9")


def test_a_name_of_nothing_is_refused_before_any_worker_starts() -> None:
    with pytest.raises(ClusterError, match="workers: cpus is 'fast'; allowed: processors, as 0-3,8, or a memory node"):
        plan_workers(load(None, None, {"workers.cpus": ["fast"]}).config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"workers.cpus": ["0", "99999"]}, "workers: cpus is '99999'; allowed on this machine: "),
        ({"workers.cpus": ["0"], "workers.threads": 2}, "workers: cpus is '0', which is 1 here, and threads is 2; allowed: at"),
    ],
)
def test_what_a_local_worker_would_not_find_is_refused_before_ray_starts(
    flags: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a machine is profiled. What another machine has is known there alone."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0, 1})
    started: list[object] = []
    monkeypatch.setattr("conductor.cluster.connect", lambda *args: started.append(args))
    local = load(None, None, flags).config
    for begin in (plan_workers, partial(cluster_profile, fresh=True)):
        with pytest.raises(ClusterError, match=message):
            begin(local)
    assert started == []
    assert len(plan_workers(load(None, None, {**flags, "cluster.address": "ray.example:6379"}).config)) == 3
