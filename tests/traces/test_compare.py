"""Comparisons of many simulations."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from conductor.core.placement import Choice, Situation
from conductor.core.policies import policy_named
from tests.traces.sim_builders import options
from traces.compare import Cell, Summary, TraceSource, cells_of, compare, run_serially, simulate_cell

POLICIES = {name: policy_named(name) for name in ("round_robin", "random")}


@pytest.fixture
def cells(tmp_path: Path) -> list[Cell]:
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 200 * number,
            "input_length": 1600,
            "output_length": 5,
            "hash_ids": [0, number, 100 + number, 200 + number],
        }
        for number in range(1, 9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return cells_of(TraceSource(path), options(), POLICIES, (1.0, 2.0), (0, 1))


def interrupted(cells: Sequence[Cell]) -> Iterator[tuple[int, Summary]]:
    yield 0, simulate_cell(cells[0])
    raise KeyboardInterrupt


def ignore(cell: Cell, computed: bool) -> None:
    pass


def test_every_combination_has_a_cell_of_its_own(cells: list[Cell]) -> None:
    """Two policies at two speeds with two seeds."""
    assert len({cell.name for cell in cells}) == 8


def test_interrupted_comparison_goes_on(cells: list[Cell], tmp_path: Path) -> None:
    """What was computed is kept; only the rest is computed."""
    with pytest.raises(KeyboardInterrupt):
        compare(cells, tmp_path / "out", interrupted, ignore)
    computed: list[str] = []
    resumed = compare(cells, tmp_path / "out", run_serially, lambda cell, fresh: computed.append(cell.name) if fresh else None)
    assert computed == [cell.name for cell in cells[1:]]
    assert resumed == compare(cells, tmp_path / "anew", run_serially, ignore)


def test_figures_of_another_trace_are_not_kept(cells: list[Cell], tmp_path: Path) -> None:
    """A changed trace file means another comparison."""
    first = compare(cells[:1], tmp_path / "out", run_serially, ignore)
    path = cells[0].source.path
    path.write_text(path.read_text().splitlines()[0] + "\n")
    second = compare(cells[:1], tmp_path / "out", run_serially, ignore)
    assert (first[0]["requests"], second[0]["requests"]) == (8, 1)


def test_changed_code_of_a_policy_is_computed_anew(cells: list[Cell]) -> None:
    """A cell's fingerprint covers its policy's own source; its file name holds no character that a path could not."""

    def first(situation: Situation) -> Choice | None:
        return policy_named("round_robin")(situation)

    def second(situation: Situation) -> Choice | None:
        return policy_named("random")(situation)

    base = cells[0].options
    old, new = (cells_of(cells[0].source, base, {"mine:place": place}, (1.0,), (0,))[0] for place in (first, second))
    assert old.name == new.name == "mine_place-speed1-seed0"
    assert old.fingerprint("") != new.fingerprint("")


def test_order_of_computing_does_not_matter(cells: list[Cell], tmp_path: Path) -> None:
    """Cells that end in any order, as tasks of a cluster do, give the same figures."""

    def backwards(chosen: Sequence[Cell]) -> Iterator[tuple[int, Summary]]:
        for number in reversed(range(len(chosen))):
            yield number, simulate_cell(chosen[number])

    assert compare(cells, tmp_path / "a", backwards, ignore) == compare(cells, tmp_path / "b", run_serially, ignore)


@pytest.mark.live
def test_cells_on_ray_equal_serial_ones(cells: list[Cell], tmp_path: Path) -> None:
    """A run split over Ray tasks gives the bytes of a serial one."""
    from traces.distributed import run_on_ray

    on_ray = compare(cells, tmp_path / "ray", lambda chosen: run_on_ray(chosen, None), ignore)
    assert on_ray == compare(cells, tmp_path / "serial", run_serially, ignore)
