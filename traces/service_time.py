"""How long the simulated hardware really takes: the ground truth of a simulation, which the scheduler never sees.

A prefill step computes chunks of one or several prompts together; a decode step makes one token for each sequence of a batch.
Two forms of prefill truth: the published polynomial of a step's computed tokens, and equation 1 of the Mooncake paper
(FAST'25, section 5.2) with separate efficiencies for its linear and its attention part. Nothing here is shared with the
scheduler's belief: that is fitted on samples of this truth (`traces/belief.py`), so its error is real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

Chunk: TypeAlias = tuple[int, int]
"""(first token, number of tokens) of the part of a prompt that one step computes."""


class PrefillTime(Protocol):
    """Truth of prefill."""

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of one step over `chunks` of distinct prompts."""


@dataclass(frozen=True, slots=True)
class PolynomialPrefill:
    """`base + linear * x + quadratic * x^2` of the `x` tokens that a step computes, wherever in their prompts they lie."""

    base_s: float
    per_token_s: float
    per_token2_s: float

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        tokens = 0
        for _, count in chunks:
            tokens += count
        return self.base_s + (self.per_token_s + self.per_token2_s * tokens) * tokens


@dataclass(frozen=True, slots=True)
class FlopsPrefill:
    """Equation 1's floating-point operations over what the accelerators reach.

    `attention_efficiency` may exceed 1: the equation counts the whole square of the sequence, a causal kernel half of it. The
    efficiency of the linear part rises with a step's tokens as `x / (x + half_efficiency_tokens)`, and kernels work on whole
    tiles of `tile_tokens`.
    """

    layers: int
    hidden: int
    attention_factor: float
    linear_factor: float
    peak_flops: float
    linear_efficiency: float
    attention_efficiency: float
    half_efficiency_tokens: float
    tile_tokens: int
    launch_s: float

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        tokens = 0
        squares = 0.0
        for start, count in chunks:
            tokens += count
            squares += (2 * start + count) * count
        linear_flops = (
            self.layers * self.linear_factor * self.hidden**2 * (_tiled(tokens, self.tile_tokens) + self.half_efficiency_tokens)
        )
        attention_flops = self.layers * self.attention_factor * self.hidden * squares
        busy = linear_flops / self.linear_efficiency + attention_flops / self.attention_efficiency
        return self.launch_s + busy / self.peak_flops


@dataclass(frozen=True, slots=True)
class QuadraticPrefill:
    """`base + per_token * x + per_token2 * sum((start + x)^2 - start^2)`, as measured on a machine of one's own; `x` counts
    whole tiles of `tile_tokens`."""

    base_s: float
    per_token_s: float
    per_token2_s: float
    tile_tokens: int

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        tokens = 0
        squares = 0
        for start, count in chunks:
            tokens += count
            squares += (2 * start + count) * count
        return self.base_s + self.per_token_s * _tiled(tokens, self.tile_tokens) + self.per_token2_s * squares


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """`base + per_sequence * batch + per_context_token * T + per_context_token2 * T^2`, `T` the tokens of KV in the batch."""

    base_s: float
    per_sequence_s: float
    per_context_token_s: float
    per_context_token2_s: float = 0.0

    def step_s(self, batch: int, context_tokens: int) -> float:
        """Seconds of one step."""
        quadratic = self.per_context_token2_s * context_tokens
        return self.base_s + self.per_sequence_s * batch + (self.per_context_token_s + quadratic) * context_tokens

    def run(self, batch: int, context_tokens: int) -> DecodeRun:
        """The steps of an unchanging batch that starts with `context_tokens` of KV."""
        slope = self.per_context_token_s + 2 * self.per_context_token2_s * context_tokens
        return DecodeRun(self.step_s(batch, context_tokens), slope * batch, self.per_context_token2_s * batch**2)


class DecodeRun(NamedTuple):
    """Steps of a batch that nobody joins or leaves: step `k` takes `first + linear * k + quadratic * k^2` seconds, because
    each step adds a token of KV to every sequence."""

    first_s: float
    linear_s: float
    quadratic_s: float

    def stretched(self, times: float) -> DecodeRun:
        """The same, each step so many times as long."""
        return self if times == 1.0 else DecodeRun(self.first_s * times, self.linear_s * times, self.quadratic_s * times)

    def step_s(self, step: int) -> float:
        """Seconds of step `step`, counted from 0."""
        return self.first_s + (self.linear_s + self.quadratic_s * step) * step

    def elapsed_s(self, steps: int) -> float:
        """Seconds of the first `steps` steps."""
        pairs = steps * (steps - 1) / 2
        return self.first_s * steps + self.linear_s * pairs + self.quadratic_s * pairs * (2 * steps - 1) / 3

    def steps_until(self, elapsed_s: float) -> int:
        """The least number of steps that take at least `elapsed_s`."""
        if elapsed_s <= 0:
            return 0
        steps = max(1, int(elapsed_s / self.first_s))
        steps = max(1, steps + int((elapsed_s - self.elapsed_s(steps)) / max(self.step_s(steps), self.first_s / 2)))
        while self.elapsed_s(steps) < elapsed_s:
            steps += 1
        while steps > 1 and self.elapsed_s(steps - 1) >= elapsed_s:
            steps -= 1
        return steps


@dataclass(frozen=True, slots=True)
class Stages:
    """How prefill steps pass through a group of `count` nodes, each with an equal share of the layers (chunked pipeline
    parallelism, Mooncake FAST'25, section 5.1). `hop_s` is what it takes to pass activations from one to the next.

    One node is a pipeline of one stage.
    """

    count: int = 1
    hop_s: float = 0.0

    def free_s(self, begin_s: float, step_s: float) -> float:
        """When the first stage can take the next step, after one that a single node would compute in `step_s`."""
        return begin_s + step_s / self.count

    def end_s(self, begin_s: float, step_s: float, previous_end_s: float) -> float:
        """When the step leaves the last stage, which may be held up by the step before it."""
        return max(begin_s + step_s + (self.count - 1) * self.hop_s, previous_end_s + step_s / self.count)


@dataclass(frozen=True, slots=True)
class ServiceTime:
    """Truth of one kind of worker."""

    prefill: PrefillTime
    decode: DecodeTime
    stages: Stages = Stages()

    def prompt_s(self, prompt: int, reused: int, step_tokens: int) -> float:
        """Seconds of one prompt alone on a worker."""
        free_s = end_s = 0.0
        for chunk in chunks_of(prompt, reused, step_tokens):
            step_s = self.prefill.step_s([chunk])
            begin_s, free_s = free_s, self.stages.free_s(free_s, step_s)
            end_s = self.stages.end_s(begin_s, step_s, end_s)
        return end_s


def chunks_of(prompt: int, reused: int, step_tokens: int) -> list[Chunk]:
    """The steps of one prompt alone on an engine."""
    return [(start, min(step_tokens, prompt - start)) for start in range(reused, prompt, step_tokens)]


def _tiled(tokens: int, tile_tokens: int) -> int:
    """`tokens` rounded up to whole tiles."""
    return -(-tokens // tile_tokens) * tile_tokens
