"""Tokens become text: whole characters, one end, log probabilities that match what is shown."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.core.messages import TokenOutput
from conductor.core.types import FinishReason
from conductor.gateway.assembler import Delta, TextAssembler
from tests.doubles.byte_tokenizer import EOS, ByteDetokenizer
from tests.gateway.test_stops import shown_at_most


def assemble(tokens: list[int], finish: FinishReason, stops: list[str]) -> tuple[list[Delta], TextAssembler]:
    assembler = TextAssembler(ByteDetokenizer(), stops, frozenset({EOS}))
    deltas = []
    for index, token in enumerate(tokens):
        last = finish if index == len(tokens) - 1 else None
        deltas.append(assembler.push(TokenOutput("r", 1, index, token, "d0", finish_reason=last, logprob=-1.0)))
        if deltas[-1].finish is not None:
            break
    return deltas, assembler


@given(text=st.text("aé漢🙂#", min_size=1, max_size=20), stops=st.lists(st.text("é漢#", min_size=1, max_size=3), max_size=3))
@settings(max_examples=200, deadline=None)
def test_text_and_log_probabilities_agree(text: str, stops: list[str]) -> None:
    """The deltas add up to the text before the stop string; exactly the tokens that begin within it are reported."""
    deltas, _ = assemble([*text.encode(), EOS], FinishReason.STOP, stops)
    shown = "".join(delta.text for delta in deltas)
    assert shown == shown_at_most(text, stops)
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish is FinishReason.STOP
    entries = [entry for delta in deltas for entry in delta.entries]
    assert bytes(entry.token_id for entry in entries) == shown.encode()


def test_a_stop_string_in_the_last_token_wins_over_length() -> None:
    deltas, _ = assemble(list(b"a#"), FinishReason.LENGTH, ["#"])
    assert deltas[-1] == Delta("", (), FinishReason.STOP)


def test_held_text_comes_out_at_the_end() -> None:
    deltas, assembler = assemble(list(b"a#"), FinishReason.LENGTH, ["##"])
    assert ("".join(delta.text for delta in deltas), deltas[-1].finish) == ("a#", FinishReason.LENGTH)
    assert assembler.output_tokens == 2


def test_an_output_without_a_token_counts_nothing() -> None:
    assembler = TextAssembler(ByteDetokenizer(), (), frozenset())
    delta = assembler.push(TokenOutput("r", 1, 0, None, "d0", finish_reason=FinishReason.FAILED, message="why"))
    assert (delta.text, delta.message, assembler.output_tokens) == ("", "why", 0)
