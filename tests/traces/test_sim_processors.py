"""Workers of one machine that has fewer processors than workers."""

from __future__ import annotations

import pytest

from conductor.core.events import PrefillFinished
from tests.traces.sim_builders import options, profile, row, run
from traces.sim.processors import Processors


def shared(count: float | None) -> dict[str, float] | None:
    return None if count is None else {"count": count}


def test_who_begins_gets_an_equal_part() -> None:
    processors = Processors(2)
    told: list[float] = []
    processors.follow(lambda: told.append(processors.stretch))
    assert [processors.begin(name) for name in ("a", "b", "c", "c")] == [1.0, 1.0, 1.5, 1.5]
    processors.end("a")
    processors.end("unknown")
    assert processors.begin("d") == 1.5
    assert told == [1.5, 1.0, 1.5]
    assert Processors().begin("a") == 1.0


def test_who_computes_beside_others_is_crowded() -> None:
    """All at once are as slow as was measured, fewer in proportion; a part that something else takes is shared by all."""
    three = Processors(3, crowding=1.5)
    assert [three.begin(name) for name in range(4)] == pytest.approx([1.0, 1.25, 1.5, 4 / 3 * 1.5])
    part = Processors(1.5, crowding=1.2)
    assert [part.begin(name) for name in range(2)] == pytest.approx([1.0, 2 / 1.5 * 1.2])
    assert Processors(0.5, crowding=1.2).begin("a") == 2.0


@pytest.mark.parametrize(("count", "second_s"), [(None, 1.0), (2, 1.0), (1, 2.0)])
def test_two_prompts_on_one_processor_take_turns(count: int | None, second_s: float) -> None:
    """The one that begins beside another takes twice as long; with a processor for each they know nothing of each other."""
    cluster = profile(processors=shared(count))
    alone_s = cluster.service_time().prompt_s(2000, 0, cluster.step_tokens)
    trace = [row(0.0, 2000, first_block=1000 * number) for number in range(2)]
    _, calls = run(trace, options(cluster, prefill_workers=2, decode_workers=1))
    computed = sorted(event.compute_s for _, event, _ in calls if isinstance(event, PrefillFinished))
    assert computed == pytest.approx([alone_s, second_s * alone_s])


def test_a_batch_beside_a_prompt_decodes_slower() -> None:
    """What one request decodes while the next one is computed takes longer than by itself, and than on two processors."""
    trace = [row(0.0, 500, 200, first_block=1000), row(0.05, 60_000, 1, first_block=2000)]

    def last_token_s(count: int | None) -> float | None:
        simulation, _ = run(trace, options(profile(processors=shared(count)), prefill_workers=1, decode_workers=1))
        return next(iter(simulation.records.values())).finished_s

    assert last_token_s(2) == last_token_s(None)
    assert last_token_s(1) > last_token_s(2)


def test_an_engine_of_both_kinds_shares_none() -> None:
    with pytest.raises(ValueError, match=r"processors\.count is 2 with coupled workers; allowed: none"):
        options(profile(processors=shared(2)), coupled_workers=1)
