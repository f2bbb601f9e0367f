"""Prefill workers that are groups of nodes: chunks flow through their stages."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.core.events import PrefillFinished
from tests.traces.sim_builders import options, profile, row, run
from tests.traces.test_simulator import policies, traces
from traces.service_time import Stages, chunks_of
from traces.sim.results import collect
from traces.simulator import Outage

HOP_S = 0.004


def grouped(stages: int, **changes: float) -> dict[str, object]:
    return {"pipeline": {"stages": stages, "hop_s": HOP_S}, **changes}


def leaves_s(steps_s: list[float], stages: int) -> list[float]:
    """When each step leaves the last stage: a step enters a stage when it has left the one before, and the step before it has
    left this one."""
    free_s = [0.0] * stages
    ends = []
    for step_s in steps_s:
        now = free_s[0]
        for stage in range(stages):
            now = free_s[stage] = max(now + (HOP_S if stage else 0.0), free_s[stage]) + step_s / stages
        ends.append(now)
    return ends


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8), st.integers(1, 6))
def test_steps_leave_as_they_do_stage_by_stage(steps_s: list[float], count: int) -> None:
    """The two ends of the pipeline say it all: brute force over every stage says the same."""
    stages, free_s, end_s, ends = Stages(count, HOP_S), 0.0, 0.0, []
    for step_s in steps_s:
        begin_s, free_s = free_s, stages.free_s(free_s, step_s)
        end_s = stages.end_s(begin_s, step_s, end_s)
        ends.append(end_s)
    assert ends == pytest.approx(leaves_s(steps_s, count))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_long_prompt_flows_through_the_stages(stages: int) -> None:
    """Its chunks are computed one behind the other, and what it took is what the truth says of a prompt alone."""
    cluster = profile(**grouped(stages))
    _, calls = run([row(0.0, 40_000)], options(cluster, prefill_workers=1))
    ((now, event),) = [(now, event) for now, event, _ in calls if isinstance(event, PrefillFinished)]
    truth = cluster.service_time()
    assert event.compute_s == pytest.approx(now)
    assert now == pytest.approx(truth.prompt_s(40_000, 0, cluster.step_tokens))
    steps_s = [truth.prefill.step_s([chunk]) for chunk in chunks_of(40_000, 0, cluster.step_tokens)]
    assert now == pytest.approx(leaves_s(steps_s, stages)[-1])


def test_prompts_follow_each_other_at_the_pace_of_one_stage() -> None:
    """The first is as late as on one node, but for the hops; each next one comes a stage's time after it."""
    cluster = profile(**grouped(4))
    trace = [row(0.0, cluster.step_tokens, first_block=1000 * number) for number in range(1, 6)]
    simulation, calls = run(trace, options(cluster, prefill_workers=1))
    ends = [now for now, event, _ in calls if isinstance(event, PrefillFinished)]
    step_s = cluster.service_time().prefill.step_s([(0, cluster.step_tokens)])
    assert ends[0] == pytest.approx(step_s + 3 * HOP_S)
    assert [after - before for before, after in pairwise(ends)] == pytest.approx([step_s / 4] * 4)
    assert collect("test", simulation).gpus == (4 + 2) * cluster.gpus_per_worker


@settings(max_examples=25)
@given(traces, policies, st.integers(2, 4), st.sampled_from([None, 0.3, 2.0]))
def test_groups_finish_everything(trace: list, policy: str, stages: int, lost_s: float | None) -> None:
    """Also when one is lost with several steps under way; nothing stays pinned."""
    outages = () if lost_s is None else (Outage("prefill-000", lost_s, lost_s + 0.5),)
    simulation, _ = run(trace, options(profile(**grouped(stages, device_blocks=64)), policy=policy, outages=outages))
    assert all(record.finished_s is not None for record in simulation.records.values())
    assert all(worker.cache.pinned_blocks == 0 for worker in simulation.cluster.workers.values())


def test_a_group_cannot_be_coupled() -> None:
    with pytest.raises(ValueError, match=r"pipeline.stages is 2 with coupled workers; allowed: 1"):
        options(profile(**grouped(2)), coupled_workers=1)
