"""Virtual time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traces.sim_builders import run_loop
from traces.sim.loop import At, EventLoop


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.5]), st.sampled_from(list(At))), max_size=40))
def test_actions_run_by_time_then_declared_order_then_planning(planned: list[tuple[float, At]]) -> None:
    """At equal times completions come before reports, arrivals, timers and the begin of steps."""
    loop = EventLoop()
    seen: list[tuple[float, At, int]] = []
    for number, (time_s, order) in enumerate(planned):
        loop.at(time_s, order, lambda *action: seen.append(action), time_s, order, number)
    run_loop(loop)
    assert sorted(seen) == seen
    assert len(planned) == len(seen)


def test_nothing_can_be_planned_in_the_past() -> None:
    """Time does not go back (I6)."""
    loop = EventLoop()
    loop.at(5.0, At.TIMER, lambda: loop.at(4.0, At.TIMER, lambda: None))
    with pytest.raises(ValueError, match=r"time 4.0 lies before the present 5.0"):
        run_loop(loop)
