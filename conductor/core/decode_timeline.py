"""When placed requests are expected to begin and to end decoding: the decode load of any moment ahead.

Placed requests count from the predicted end of their prefill until they are expected to have produced their output, which is
the system-level prediction of Mooncake (arXiv v3, section 7.4): requests that prefill by then are added, uniformly over the
decode workers, those that are done before then are taken out. Columns of numbers with a free list, so that looking ahead
over thousands of requests is a few vector operations.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from conductor.core.types import InvariantError, RequestId
from conductor.core.worker_table import FloatArray

FIRST_ROOM = 64


class DecodeCrowd(NamedTuple):
    """Requests that decode at one moment, and the context tokens they hold together."""

    requests: int
    context_tokens: float


class DecodeTimeline:
    def __init__(self) -> None:
        self._row: dict[RequestId, int] = {}
        self._free = list(range(FIRST_ROOM - 1, -1, -1))
        self._begin_s: FloatArray = np.full(FIRST_ROOM, math.inf)
        self._end_s: FloatArray = np.full(FIRST_ROOM, math.inf)
        self._context: FloatArray = np.zeros(FIRST_ROOM)

    def __len__(self) -> int:
        return len(self._row)

    def expect(self, request: RequestId, begin_s: float, end_s: float, context_tokens: int) -> None:
        """The request will decode from `begin_s` to `end_s`. Told again, it replaces what was expected before."""
        row = self._row.get(request)
        if row is None:
            if not self._free:
                self._grow()
            row = self._row[request] = self._free.pop()
        self._begin_s[row], self._end_s[row], self._context[row] = begin_s, end_s, context_tokens

    def forget(self, request: RequestId) -> None:
        row = self._row.pop(request, None)
        if row is not None:
            self._begin_s[row] = self._end_s[row] = math.inf
            self._free.append(row)

    def at(self, moment_s: float) -> DecodeCrowd:
        decoding = (self._begin_s <= moment_s) & (self._end_s > moment_s)
        return DecodeCrowd(int(decoding.sum()), float(self._context[decoding].sum()))

    def drain_s(self, now: float, share: float) -> float:
        """How long until a `share` of those that decode are expected to be done; 0 when nobody decodes."""
        ends_s = self._end_s[(self._begin_s <= now) & np.isfinite(self._end_s)]
        if not len(ends_s):
            return 0.0
        return max(0.0, float(np.quantile(ends_s, min(max(share, 0.0), 1.0))) - now)

    def check(self) -> None:
        if len(self._row) + len(self._free) != len(self._begin_s) or len(set(self._row.values())) != len(self._row):
            raise InvariantError(f"{len(self._row)} expected decodes and {len(self._free)} free rows of {len(self._begin_s)}")

    def _grow(self) -> None:
        old = len(self._begin_s)
        self._free = list(range(2 * old - 1, old - 1, -1))
        self._begin_s = np.concatenate([self._begin_s, np.full(old, math.inf)])
        self._end_s = np.concatenate([self._end_s, np.full(old, math.inf)])
        self._context = np.concatenate([self._context, np.zeros(old)])
