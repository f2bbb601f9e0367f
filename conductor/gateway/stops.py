"""Stop strings over text that arrives in pieces of any size.

`StopBuffer` passes text on as early as it can be sure that no stop string begins in it, and holds back the rest. What it
decides depends on the whole text alone, never on how the text was cut: the stop string that *ends* first wins, and of
those that end together the one that starts first; the output is the text before it.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopBuffer:
    """Mutable; one for each choice. After a hit (`stopped`) it swallows everything."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self.stopped = False

    def push(self, text: str) -> str:
        """Take the next piece and return the text that may be shown because of it."""
        if not self._stops:
            return text
        if self.stopped or not text:
            return ""
        seen = self._held + text
        cut = self._first_hit(seen)
        if cut is not None:
            self.stopped = True
            self._held = ""
            return seen[:cut]
        keep = self._open_suffix(seen)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep]

    def flush(self) -> str:
        """The text has ended: what was held back is not a stop string after all."""
        held, self._held = self._held, ""
        return held

    def _first_hit(self, seen: str) -> int | None:
        """Where the winning stop string starts, None without a hit."""
        hits = [(start + len(stop), start) for stop in self._stops if (start := seen.find(stop)) >= 0]
        return min(hits)[1] if hits else None

    def _open_suffix(self, seen: str) -> int:
        """Length of the longest end of `seen` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(seen)), 0, -1):
            tail = seen[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
