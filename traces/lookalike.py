"""Traces that look like Mooncake's published ones: the same lengths, arrivals and prefix reuse, from a seed.

Requests either open a session behind one of a few system prompts or go on with an earlier one: the prompt of a
continuation begins with all full blocks of its parent's. Lengths come first, from the published distribution; the parent
is then the longest one that fits into the prompt and has had time to be answered. How often a request goes on rather than
opens is steered by the hit ratio so far, so that the whole trace has the published one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TypeAlias

from sortedcontainers import SortedKeyList

from traces.laws import ArrivalLaw, LogNormalLaw, WeibullLaw
from traces.schema import MOONCAKE_BLOCK_TOKENS, TraceRequest

STEERING_GAIN = 20.0
Ids: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """A prefix that a share of the sessions begins with."""

    blocks: int
    share: float


@dataclass(frozen=True, slots=True)
class Workload:
    """One published trace, as figures.

    `reply_s` bounds the pause before a prompt can be gone on from, `patience_s` is the mean of how long it can be from then on.
    `branching` lets several prompts go on from one, as questions about one document do; else the latest turn alone can be
    gone on from, as in a chat.
    """

    name: str
    requests: int
    rate_per_s: float
    arrivals: ArrivalLaw
    input_tokens: LogNormalLaw
    output_tokens: WeibullLaw
    system_prompts: tuple[SystemPrompt, ...]
    token_hit_ratio: float
    reply_s: tuple[float, float]
    patience_s: float
    branching: bool
    traffic_class: str


@dataclass(frozen=True, slots=True, order=True)
class _Turn:
    """A prompt that may be gone on from: its full blocks and the length of prompt and answer together."""

    context_tokens: int
    number: int
    ids: Ids = field(compare=False)
    session: str = field(compare=False)
    turn: int = field(compare=False)


def lookalike(workload: Workload, requests: int, seed: int) -> Iterator[TraceRequest]:
    """`requests` requests of `workload`; the same seed gives the same ones."""
    rng = random.Random(seed)
    times_s = workload.arrivals(requests, workload.rate_per_s, rng)
    inputs = workload.input_tokens.draw(requests, rng)
    outputs = workload.output_tokens.draw(requests, rng)
    sessions = _Sessions(workload, rng)
    for time_s, input_tokens, output_tokens in zip(times_s, inputs, outputs, strict=True):
        yield sessions.request(round(time_s, 3), input_tokens, output_tokens)


class _Sessions:
    """The prompts so far and the hit ratio that they came to."""

    def __init__(self, workload: Workload, rng: random.Random) -> None:
        self._workload = workload
        self._rng = rng
        self._next_id = 0
        self._numbers = 0
        self._system = tuple(self._fresh(prompt.blocks) for prompt in workload.system_prompts)
        self._seen_system: set[int] = set()
        self._answering: list[tuple[float, _Turn]] = []  # heaps by time
        self._waiting: list[tuple[float, _Turn]] = []
        self._open: SortedKeyList[_Turn] = SortedKeyList(key=lambda turn: (turn.context_tokens, turn.number))
        self._tokens = 0
        self._hit_tokens = 0

    def request(self, time_s: float, input_tokens: int, output_tokens: int) -> TraceRequest:
        self._answered(time_s)
        parent = self._parent(input_tokens) if self._goes_on() else None
        prefix, session, turn = self._opening(input_tokens) if parent is None else (parent.ids, parent.session, parent.turn + 1)
        blocks = -(-input_tokens // MOONCAKE_BLOCK_TOKENS)
        ids = prefix + self._fresh(blocks - len(prefix))
        self._tokens += input_tokens
        self._numbers += 1
        full_ids = ids[: input_tokens // MOONCAKE_BLOCK_TOKENS]
        self._wait_for_answer(time_s, _Turn(input_tokens + output_tokens, self._numbers, full_ids, session, turn))
        return TraceRequest(
            timestamp_s=time_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            hash_ids=ids,
            session=session,
            turn=turn,
            traffic_class=self._workload.traffic_class,
        )

    def _goes_on(self) -> bool:
        ratio = self._hit_tokens / self._tokens if self._tokens else 0.0
        return self._rng.random() < 0.5 + STEERING_GAIN * (self._workload.token_hit_ratio - ratio)

    def _parent(self, input_tokens: int) -> _Turn | None:
        """The longest open prompt that leaves room for at least one token of its own in a prompt of `input_tokens`."""
        place = self._open.bisect_key_left((input_tokens, 0)) - 1
        if place < 0:
            return None
        parent: _Turn = self._open[place] if self._workload.branching else self._open.pop(place)
        self._hit_tokens += len(parent.ids) * MOONCAKE_BLOCK_TOKENS
        return parent

    def _opening(self, input_tokens: int) -> tuple[Ids, str, int]:
        shares = [prompt.share for prompt in self._workload.system_prompts]
        choice = self._rng.choices(range(len(shares)), shares)[0]
        prefix = self._system[choice][: -(-input_tokens // MOONCAKE_BLOCK_TOKENS)]
        if choice in self._seen_system:
            self._hit_tokens += min(len(prefix) * MOONCAKE_BLOCK_TOKENS, input_tokens)
        self._seen_system.add(choice)
        return prefix, str(self._numbers), 1

    def _wait_for_answer(self, time_s: float, turn: _Turn) -> None:
        heappush(self._answering, (time_s + self._rng.uniform(*self._workload.reply_s), turn))

    def _answered(self, time_s: float) -> None:
        """Open the prompts that have been answered by `time_s`, and close those whose users have left."""
        while self._answering and self._answering[0][0] <= time_s:
            ready_s, turn = heappop(self._answering)
            self._open.add(turn)
            heappush(self._waiting, (ready_s + self._rng.expovariate(1 / self._workload.patience_s), turn))
        while self._waiting and self._waiting[0][0] <= time_s:
            self._open.discard(heappop(self._waiting)[1])

    def _fresh(self, count: int) -> Ids:
        first = self._next_id
        self._next_id += count
        return tuple(range(first, self._next_id))
