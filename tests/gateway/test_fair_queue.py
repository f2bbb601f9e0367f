"""Deficit round robin: shares follow weights, and nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.gateway.fair_queue import FairQueue

costs = st.floats(0.5, 2000)


def test_one_flow_is_first_in_first_out() -> None:
    queue: FairQueue[int] = FairQueue(10)
    for item in range(5):
        queue.push("a", item, cost=100)
    assert [queue.pop() for _ in range(5)] == [0, 1, 2, 3, 4]
    assert not queue


def test_an_empty_queue_says_so() -> None:
    with pytest.raises(IndexError):
        FairQueue[int](10).pop()


def test_small_items_are_not_held_up_by_a_flood_of_large_ones() -> None:
    """A tenant with one small request is served at once, although the other one came first with a hundred large ones."""
    queue: FairQueue[str] = FairQueue(100)
    for item in range(100):
        queue.push("flood", f"f{item}", cost=5000)
    queue.push("small", "s", cost=50)
    assert "s" in [queue.pop() for _ in range(2)]


def test_a_removed_item_is_never_served() -> None:
    queue: FairQueue[str] = FairQueue(10)
    queue.push("a", "gone", cost=1)
    queue.push("a", "stays", cost=1)
    assert queue.remove("a", "gone")
    assert not queue.remove("a", "gone")
    assert not queue.remove("b", "never came")
    assert (queue.pop(), len(queue)) == ("stays", 0)


@given(pushed=st.lists(st.tuples(st.sampled_from("abcd"), costs, st.floats(0.1, 10)), max_size=40), quantum=st.floats(1, 5000))
@settings(max_examples=150, deadline=None)
def test_every_item_is_served_once_and_in_order_within_its_flow(pushed: list[tuple[str, float, float]], quantum: float) -> None:
    """Whatever costs and weights are: no starvation, nothing lost, nothing twice."""
    queue: FairQueue[tuple[str, int]] = FairQueue(quantum)
    for number, (flow, cost, weight) in enumerate(pushed):
        queue.push(flow, (flow, number), cost=cost, weight=weight)
    served = [queue.pop() for _ in pushed]
    assert not queue
    for flow in "abcd":
        mine = [number for name, number in served if name == flow]
        assert mine == [number for number, (name, _, _) in enumerate(pushed) if name == flow]


@given(
    weights=st.lists(st.floats(0.5, 8), min_size=2, max_size=4),
    item_costs=st.lists(costs, min_size=1, max_size=8),
    quantum=st.floats(10, 2000),
)
@settings(max_examples=100, deadline=None)
def test_shares_are_proportional_to_weights(weights: list[float], item_costs: list[float], quantum: float) -> None:
    """While all flows wait, what each was served per weight differs by no more than a round and the largest item."""
    queue: FairQueue[int] = FairQueue(quantum)
    served = [0.0] * len(weights)
    cost_of = [item_costs[(flow + 1) % len(item_costs)] for flow in range(len(weights))]
    for flow, weight in enumerate(weights):
        for _ in range(2):
            queue.push(str(flow), flow, cost=cost_of[flow], weight=weight)
    for _ in range(400):
        flow = queue.pop()
        served[flow] += cost_of[flow]
        queue.push(str(flow), flow, cost=cost_of[flow], weight=weights[flow])
        shares = [amount / weight for amount, weight in zip(served, weights, strict=True)]
        assert max(shares) - min(shares) <= 2 * (quantum + max(cost_of) / min(weights)) + 1e-6


@given(others=st.lists(st.tuples(costs, st.floats(0.1, 10)), min_size=1, max_size=4), cost=costs, weight=st.floats(0.1, 10))
@settings(max_examples=100, deadline=None)
def test_a_waiting_item_is_served_within_a_bounded_amount_of_other_work(
    others: list[tuple[float, float]], cost: float, weight: float
) -> None:
    """However much the others keep sending: the rounds that the item needs bound what they get meanwhile."""
    quantum = 100.0
    queue: FairQueue[str] = FairQueue(quantum)
    for number, (each, share) in enumerate(others):
        for _ in range(2):
            queue.push(f"other{number}", f"other{number}", cost=each, weight=share)
    queue.push("mine", "mine", cost=cost, weight=weight)
    rounds = cost / (quantum * weight) + 2
    bound = sum(rounds * quantum * share + each for each, share in others)
    before = 0.0
    while (flow := queue.pop()) != "mine":
        each, share = others[int(flow.removeprefix("other"))]
        before += each
        queue.push(flow, flow, cost=each, weight=share)
        assert before <= bound + 1e-6
