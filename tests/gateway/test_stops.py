"""Stop strings: what is shown, and that it does not depend on how the text was cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.gateway.stops import StopBuffer

letters = st.text("ab#", max_size=40)
stop_strings = st.lists(st.text("ab#", min_size=1, max_size=4), max_size=4)


def shown_at_most(text: str, stops: list[str]) -> str:
    """The rule said plainly: read letter by letter; the first moment at which the text read ends with a stop string ends it."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


@given(text=letters, stops=stop_strings, sizes=st.lists(st.integers(0, 5), max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_cut_shows_the_same_text(text: str, stops: list[str], sizes: list[int]) -> None:
    """Nothing of a stop string is ever shown, and no text before it is lost."""
    buffer = StopBuffer(stops)
    shown = ""
    for piece in cut(text, sizes):
        shown += buffer.push(piece)
        assert shown_at_most(text, stops).startswith(shown)
    assert shown + buffer.flush() == shown_at_most(text, stops)
    assert buffer.stopped == (shown_at_most(text, stops) != text)


@given(text=letters, stops=stop_strings)
@settings(max_examples=200, deadline=None)
def test_text_is_held_back_no_longer_than_needed(text: str, stops: list[str]) -> None:
    """What is held back could still become a stop string."""
    buffer = StopBuffer(stops)
    shown = "".join(buffer.push(letter) for letter in text)
    held = text[len(shown) :]
    if not buffer.stopped and held:
        assert any(stop.startswith(held) and stop != held for stop in stops)


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopBuffer(()).push("as it is") == "as it is"


def test_after_a_hit_everything_is_swallowed() -> None:
    buffer = StopBuffer(["END"])
    assert buffer.push("one END two") == "one "
    assert (buffer.push("three"), buffer.flush()) == ("", "")
