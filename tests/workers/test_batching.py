"""Plans of the next step: chunks of prompts, and the batch that decodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.batching import (
    MAX_GROUPS,
    MIN_GROUP_BYTES,
    DecodePlan,
    Running,
    Waiting,
    chunk_length,
    layer_groups,
    next_prompt,
    plan_decode,
)


def plan(running: list[Running], waiting: list[Waiting], available: int, max_batch: int = 4) -> DecodePlan:
    return plan_decode(running, waiting, available_blocks=available, block_tokens=4, max_batch=max_batch)


def test_a_long_prompt_is_cut_into_chunks() -> None:
    """A chunk is full until the end of the prompt."""
    assert (chunk_length(0, 1100), chunk_length(512, 1100), chunk_length(1024, 1100)) == (512, 512, 76)


def test_prompts_keep_their_order_but_do_not_wait_for_a_pull() -> None:
    """The first that is ready is next; none when all wait for their prefix."""
    assert (next_prompt([True, True]), next_prompt([False, True]), next_prompt([False])) == (0, 1, None)


def test_everybody_decodes_while_blocks_suffice() -> None:
    """Only sequences at a block's end need another block."""
    running = [Running("a", 4, 1), Running("b", 5, 2)]
    assert DecodePlan(step=("a", "b"), grow=("a",)) == plan(running, [], available=1)


def test_the_youngest_gives_way_when_blocks_run_out() -> None:
    """The oldest goes on with what the youngest gives back."""
    running = [Running("old", 4, 1), Running("young", 4, 1)]
    assert DecodePlan(step=("old",), grow=("old",), preempt=("young",)) == plan(running, [Waiting("w")], available=0)


def test_a_lone_sequence_without_room_steps_aside() -> None:
    """When even the oldest cannot grow (others' hand-overs hold the rest), it gives way as well."""
    assert DecodePlan(preempt=("only",)) == plan([Running("only", 8, 2)], [], available=0)


def test_sequences_join_in_order_up_to_the_batch_limit() -> None:
    """A hand-over needs no blocks; one that must be computed again needs them."""
    waiting = [Waiting("a"), Waiting("b", 3), Waiting("c")]
    assert plan([], waiting, available=3).admit == ("a", "b", "c")
    assert plan([], waiting, available=3, max_batch=2).admit == ("a", "b")


def test_only_who_has_its_blocks_overtakes() -> None:
    """One that does not fit holds back the others that need blocks, but not those that will give theirs back."""
    waiting = [Waiting("big", 3), Waiting("small", 1), Waiting("ready")]
    assert plan([], waiting, available=2).admit == ("ready",)


@given(
    sizes=st.lists(st.integers(1, 20), max_size=6),
    needs=st.lists(st.integers(0, 4), max_size=4),
    available=st.integers(0, 6),
    max_batch=st.integers(1, 6),
)
def test_a_plan_never_needs_more_than_there_is(sizes: list[int], needs: list[int], available: int, max_batch: int) -> None:
    """Growth and admission fit into free plus given-back blocks; everybody is either kept or preempted, youngest first."""
    running = [Running(i, tokens, -(-tokens // 4)) for i, tokens in enumerate(sizes)]
    waiting = [Waiting(100 + i, need) for i, need in enumerate(needs)]
    planned = plan(running, waiting, available, max_batch)
    given_back = sum(running[key].blocks for key in planned.preempt if isinstance(key, int))
    joined = sum(need for i, need in enumerate(needs) if 100 + i in planned.admit)
    assert len(planned.grow) + joined <= available + given_back
    assert list(range(len(sizes))) == [*planned.step, *reversed(planned.preempt)]
    assert len(planned.step) + len(planned.admit) <= max(max_batch, len(sizes))


def test_layers_are_sent_in_even_groups_that_are_worth_sending() -> None:
    """A small chunk goes as a whole, a large one in a few groups, and no layer is lost or sent twice."""
    assert layer_groups(30, 1) == [range(30)]
    assert layer_groups(32, MIN_GROUP_BYTES // 16) == [range(16), range(16, 32)]
    for layers in (1, 2, 7, 30, 61):
        groups = layer_groups(layers, 1 << 30)
        assert [layer for group in groups for layer in group] == list(range(layers))
        assert len(groups) == min(MAX_GROUPS, layers)
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
