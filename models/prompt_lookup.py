"""Guesses what comes next by looking up where the last few tokens stood before (prompt lookup, Saxena 2023).

Answers that quote their prompt, as in editing, summing up or code, repeat it for long runs. A guess costs a row in the next
step and is checked there: what is drawn does not depend on it, so it can only save steps. The longest match counts, and of
several the latest. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_MATCH = 4
SHORTEST_MATCH = 2
SEARCHED_TOKENS = 4096  # back from the end, so that a guess takes the same time in a long context


def guess_next(tokens: Sequence[int], count: int) -> list[int]:
    """At most `count` tokens that followed the latest earlier place which ends like `tokens`; none when there is none."""
    if count < 1:
        return []
    recent = list(tokens[-SEARCHED_TOKENS:])
    for length in range(min(LONGEST_MATCH, len(recent) - 1), SHORTEST_MATCH - 1, -1):
        found = _latest(recent, recent[-length:])
        if found is not None:
            return recent[found + length : found + length + count]
    return []


def _latest(tokens: list[int], ending: list[int]) -> int | None:
    """Where `ending` begins, before the end itself."""
    last = ending[-1]
    for stop in range(len(tokens) - 2, len(ending) - 2, -1):
        if tokens[stop] == last and tokens[stop - len(ending) + 1 : stop + 1] == ending:
            return stop - len(ending) + 1
    return None
