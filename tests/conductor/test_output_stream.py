"""A request's output at its front end: each index once, in order, across workers and attempts."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.core.messages import TokenOutput
from conductor.core.types import FinishReason
from conductor.output_stream import OutputStream
from tests.conductor.doubles import job, placement


def output(index: int, *, attempt: int = 1, worker: str = "d0", finish: FinishReason | None = None) -> TokenOutput:
    return TokenOutput("r1", attempt, index, 100 + index, worker, finish)


def hash_prompt(tokens: bytes, tenant: str) -> tuple[int, ...]:
    return tuple(hash((tenant, tokens[:end])) for end in range(16, len(tokens) + 1, 16))


@given(st.integers(1, 12), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_any_arrival_order_with_repetitions_comes_out_in_order_once(count: int, draw: random.Random) -> None:
    """Whatever overtakes or repeats, the front end passes on 0, 1, 2 ... and then the end."""
    stream = OutputStream(job())
    sent = [output(index, finish=FinishReason.LENGTH if index == count - 1 else None) for index in range(count)] * 2
    draw.shuffle(sent)
    passed = [ready.index for arrived in sent for ready in stream.push(arrived)]
    assert passed == list(range(count))
    assert stream.finished


def test_an_end_without_a_token_waits_for_the_tokens_before_it() -> None:
    """A stop that generated nothing comes after everything that was generated."""
    stream = OutputStream(job())
    end = TokenOutput("r1", 1, 1, None, "d0", FinishReason.STOP)
    assert stream.push(end) == []
    assert stream.push(output(0)) == [output(0), end]
    assert stream.finished


def test_the_continuation_holds_the_prompt_and_what_was_passed_on() -> None:
    """Attempt 2 begins where the client's text ends, hashed again; the total limit stays."""
    stream = OutputStream(job(tokens=7, max_tokens=10))
    for index in (0, 1, 3):
        stream.push(output(index))
    continued = stream.continue_as_next_attempt(hash_prompt)
    assert struct.unpack("<9i", continued.tokens) == (*range(7), 100, 101)
    assert continued.request.prompt_tokens == 9
    assert (continued.request.attempt, continued.request.emitted_tokens) == (2, 2)
    assert continued.request.block_hashes == hash_prompt(continued.tokens, "default")
    assert (continued.request.max_output_tokens, continued.sampling.max_tokens) == (14, 10)


def test_a_second_continuation_does_not_repeat_the_first() -> None:
    """Emitted tokens of all attempts follow the original prompt once."""
    stream = OutputStream(job(tokens=4))
    stream.push(output(0))
    stream.continue_as_next_attempt(hash_prompt)
    stream.push(output(1, attempt=2))
    continued = stream.continue_as_next_attempt(hash_prompt)
    assert struct.unpack("<6i", continued.tokens) == (0, 1, 2, 3, 100, 101)
    assert (continued.request.attempt, continued.request.emitted_tokens) == (3, 2)


def test_outputs_of_a_former_attempt_are_dropped() -> None:
    """Late tokens of an interrupted attempt, held or still to come, never mix with its continuation."""
    stream = OutputStream(job())
    stream.push(output(0))
    stream.push(output(2))
    stream.continue_as_next_attempt(hash_prompt)
    assert stream.push(output(1)) == []
    assert stream.push(output(1, attempt=2)) == [output(1, attempt=2)]


@pytest.mark.parametrize(
    ("passed", "worker", "expected"), [(0, "p0", True), (1, "p0", False), (1, "d0", True), (0, "d0", True), (1, "d9", False)]
)
def test_output_depends_on_the_prefill_worker_until_its_token_came(passed: int, worker: str, expected: bool) -> None:
    """After the first token only the decode worker can lose anything."""
    stream = OutputStream(job())
    stream.placed(placement())
    for index in range(passed):
        stream.push(output(index, worker="p0"))
    assert stream.depends_on(worker) is expected


def test_nothing_depends_on_a_worker_once_finished() -> None:
    """A complete output has nothing to lose."""
    stream = OutputStream(job())
    stream.placed(placement())
    stream.push(output(0, finish=FinishReason.STOP))
    assert not stream.depends_on("d0")
