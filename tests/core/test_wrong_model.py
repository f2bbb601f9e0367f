"""A prefill model that is not calibrated, or ten times wrong, refuses nobody who could have been served (I12).

The fault it guards against: a gate on predicted TTFT that was ten times wrong refused 8,270 requests and served 3,125, of
which nearly all could have been served (d-inference #381).
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from conductor.core.config import SchedulerConfig
from conductor.core.cost_profile import CostProfile
from conductor.core.types import SLO, RejectReason, Request
from tests.core.builders import PROFILE, request
from tests.core.served import World

OBJECTIVE_S = 2.0
REQUESTS = 150


def model(factor: float, samples: int = 100) -> CostProfile:
    """A prefill model that takes `factor` times as long as the truth."""
    return replace(
        PROFILE,
        prefill_base_s=PROFILE.prefill_base_s * factor,
        prefill_per_token_s=PROFILE.prefill_per_token_s * factor,
        samples=samples,
    )


def arrivals(every_s: float) -> list[tuple[float, Request]]:
    rng = Random(41)
    return [
        (number * every_s, request(f"r{number}", tokens=rng.choice((300, 2000, 6000)), shared=4)) for number in range(REQUESTS)
    ]


@pytest.mark.parametrize("admission", ["early", "predictive"])
@pytest.mark.parametrize("policy", ["conductor", "kvcache_centric", "local_cache_aware"])
@pytest.mark.parametrize(("factor", "samples"), [(1.0, 0), (10.0, 100), (0.1, 100), (10.0, 0)])
def test_who_could_have_been_served_is_served(factor: float, samples: int, policy: str, admission: str) -> None:
    """At two thirds of what the cluster can do, everybody is served within the objective, whatever is believed."""
    config = SchedulerConfig(policy=policy, admission=admission, slo=SLO(ttft_s=OBJECTIVE_S, tbt_s=0.1))
    served = World(config, model(factor, samples), PROFILE, (2, 2)).run(arrivals(0.25))
    assert served.rejections == []
    assert len(served.finished) == REQUESTS
    assert max(served.ttft_s.values()) <= OBJECTIVE_S


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_no_error_is_too_large_to_be_noticed(factor: float) -> None:
    """A hundredfold error is beyond what is corrected; then estimates never count as calibrated, and refuse nobody."""
    config = SchedulerConfig(policy="conductor", slo=SLO(ttft_s=OBJECTIVE_S))
    served = World(config, model(factor), PROFILE, (2, 2)).run(arrivals(0.25))
    assert (served.rejections, len(served.finished)) == ([], REQUESTS)


def test_a_right_model_refuses_what_cannot_be_served() -> None:
    """The gate is no dummy: at many times what the cluster can do, the same requests are refused by prediction."""
    config = SchedulerConfig(policy="conductor", slo=SLO(ttft_s=OBJECTIVE_S))
    served = World(config, model(1.0), PROFILE, (2, 2)).run(arrivals(0.02))
    assert {refused.reason for refused in served.rejections} <= {RejectReason.TTFT_SLO, RejectReason.OVERLOAD}
    assert len(served.rejections) > REQUESTS // 4
    assert max(served.ttft_s.values()) <= 1.2 * OBJECTIVE_S, "who is accepted is served in time"


@pytest.mark.parametrize("speed_up", [10.0, 0.1])
def test_a_model_that_turns_wrong_stops_refusing(speed_up: float) -> None:
    """After the truth has changed tenfold, the disagreement is seen within a few observations, and refusals end."""
    config = SchedulerConfig(policy="conductor", slo=SLO(ttft_s=60.0 * max(1.0, 1 / speed_up)))
    world = World(config, model(1.0), PROFILE, (2, 2))
    world.run(arrivals(0.25))
    world.truth = model(1 / speed_up)
    start_s = 1000.0
    later = [
        (start_s + number * 3.0, request(f"s{number}", tokens=2000, slo=SLO(ttft_s=0.5 if speed_up > 1 else 10.0)))
        for number in range(50)
    ]
    served = world.run(later)
    assert [refused.request_id for refused in served.rejections] == []
