"""Measures how fast a model runs here, the way the engine will run it, and remembers the fitted `CostProfile`.

Prefill is timed over a grid of (new tokens, reused tokens), decode steps over batch and context, and transfers through a
function that the worker hands in. Reused context is not computed first: attention costs the same over any KV, so the cells ask
only for their new tokens. First calls are not evidence and are thrown away. The cells come in the order of a Latin square, so
that any first few of them cover both axes: a slow machine stops after as many as a calibrated profile needs, a fast one repeats
the cheap cells until the time budget is spent, and takes their lower median, so that a passing disturbance does not decide.
A model in stages is also timed with several chunks in the flow, against the same chunks one by one.

The result is cached as JSON under everything that it depends on: model revision, device, dtypes, threads, processor, KV
layout, block and chunk size.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from conductor.core.cost_profile import MIN_CALIBRATED_SAMPLES, CostProfile, ResidualQuantiles
from models.base import CausalLM, ForwardBatch, PagedKVCache
from models.cache import cache_root, locked, read_json, write_json
from models.errors import ModelFileError
from workers.cost_fit import (
    DecodeSample,
    FitQuality,
    FittedProfile,
    KVShape,
    PrefillSample,
    Samples,
    TransferSample,
    fit_profile,
)

NEW_TOKENS = (16, 64, 128, 256, 512)
REUSED_SIXTEENTHS = (0, 1, 4, 8, 14)  # of the longest context
DECODE_BATCHES = (1, 2, 4, 8)
DECODE_CONTEXTS = (64, 512, 2048)
TRANSFER_BYTES = (1 << 18, 1 << 22, 1 << 25)
FLOW_CHUNKS = 4
FLOW_ROUNDS = 3

Clock = Callable[[], float]
Transfer = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Everything that a profile depends on."""

    model_revision: str
    device: str
    dtype: str
    kv_dtype: str
    layout: str
    threads: int
    processor: str
    block_tokens: int
    chunk_tokens: int

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return cache_root() / "profiles" / f"{digest[:32]}.json"


@dataclass(frozen=True, slots=True)
class Profiler:
    """Times one model over one cache, whose blocks it overwrites: run it before the cache serves anybody.

    `transfer(n)` moves n bytes the way the worker hands KV over. `budget_s` bounds the repetitions, not the first round.
    """

    model: CausalLM
    cache: PagedKVCache
    chunk_tokens: int = 512
    budget_s: float = 20.0
    transfer: Transfer | None = None
    clock: Clock = time.perf_counter

    def key(self, model_revision: str, dtype: str) -> ProfileKey:
        layout = self.cache.layout
        return ProfileKey(
            model_revision=model_revision,
            device=_device_name(self.cache.layers[0].device),
            dtype=dtype,
            kv_dtype=str(layout.dtype).removeprefix("torch."),
            layout=f"{layout.name}-{layout.version}",
            threads=torch.get_num_threads(),
            processor=_processor_name(),
            block_tokens=self.cache.block_tokens,
            chunk_tokens=self.chunk_tokens,
        )

    def load_or_measure(self, model_revision: str, dtype: str = "float32", *, fresh: bool = False) -> FittedProfile:
        """The remembered profile of this model on this machine, measured if there is none or if `fresh` asks for it. Workers
        that start at once on one machine measure once: the first does, the others wait."""
        key = self.key(model_revision, dtype)
        with locked(key.path.with_suffix(".lock")):
            known = None if fresh else load_profile(key)
            if known is not None:
                return known
            samples = self.measure()
            fitted = fit_profile(samples, self.shape)
            write_json(key.path, {"key": asdict(key), "fitted": asdict(fitted), "samples": asdict(samples)})
            return fitted

    @property
    def shape(self) -> KVShape:
        return KVShape(self.cache.layout.bytes_per_token, self.cache.block_tokens, self.chunk_tokens)

    def measure(self) -> Samples:
        """Run the grids. Takes about `budget_s`."""
        self._warm_up()
        started = self.clock()
        decode = self._rounds(self.decode_cells(), self._time_decode, started + self.budget_s / 4)
        prefill = self._rounds(self.prefill_cells(), self._time_prefill, started + self.budget_s)
        return Samples(
            prefill=tuple(PrefillSample(reused + new, reused, s) for (new, reused), s in prefill.items()),
            decode=tuple(DecodeSample(batch, batch * context, s) for (batch, context), s in decode.items()),
            transfer=() if self.transfer is None else tuple(self._time_transfers(self.transfer)),
            flow_share=1.0
            if self.model.stages == 1
            else statistics.median_low([self._flow_share() for _ in range(FLOW_ROUNDS)]),
        )

    def prefill_cells(self) -> list[tuple[int, int]]:
        """(new tokens, reused tokens) that the model's context and the cache hold, in Latin order."""
        longest = self._longest_tokens
        cells = [
            ((row + 2 * column) % len(REUSED_SIXTEENTHS), min(new, self.chunk_tokens), longest * reused // 16)
            for column, reused in enumerate(REUSED_SIXTEENTHS)
            for row, new in enumerate(NEW_TOKENS)
        ]
        fitting = {(new, reused): None for _, new, reused in sorted(cells) if new + reused <= longest}
        return list(fitting)

    def decode_cells(self) -> list[tuple[int, int]]:
        """(batch, context tokens of each sequence). Sequences may share blocks: what they hold does not matter."""
        contexts = [tokens for tokens in DECODE_CONTEXTS if tokens <= self._longest_tokens]
        return [(batch, context) for context in contexts for batch in DECODE_BATCHES]

    @property
    def _longest_tokens(self) -> int:
        return min(self.model.max_context, self.cache.num_blocks * self.cache.block_tokens)

    def _warm_up(self) -> None:
        self._time_prefill(*max(self.prefill_cells(), key=lambda cell: (-cell[1], cell[0])))
        for batch in DECODE_BATCHES:
            self._time_decode(batch, self.cache.block_tokens)

    def _rounds(
        self, cells: Sequence[tuple[int, int]], measure: Callable[[int, int], float], deadline: float
    ) -> dict[tuple[int, int], float]:
        """Lower median seconds a cell. The first cells are measured in any case, others and repetitions until `deadline`."""
        seconds: dict[tuple[int, int], list[float]] = {}
        for cell in cells:
            if len(seconds) < MIN_CALIBRATED_SAMPLES or self.clock() < deadline:
                seconds[cell] = [measure(*cell)]
        for cell in self._repetitions(seconds, deadline):
            seconds[cell].append(measure(*cell))
        return {cell: statistics.median_low(values) for cell, values in seconds.items()}

    def _repetitions(self, seconds: dict[tuple[int, int], list[float]], deadline: float) -> Iterator[tuple[int, int]]:
        """Cells to measure again: rounds over all, cheapest first, that end where the next would not fit before `deadline`."""
        for cell in itertools.cycle(sorted(seconds, key=lambda cell: seconds[cell][0])):
            if self.clock() + seconds[cell][0] > deadline:
                return
            yield cell

    def _time_prefill(self, new: int, reused: int) -> float:
        return self._time_forward([new], [reused])

    def _flow_share(self) -> float:
        """The share of a chunk's time after which the stages take the next: with all chunks in the flow, a prompt takes that
        share of what they take one by one, and the rest of the last one's."""
        tokens = max(1, min(self.chunk_tokens, self._longest_tokens // FLOW_CHUNKS))
        contexts = [tokens * chunk for chunk in range(FLOW_CHUNKS)]
        alone_s = [self._time_prefill(tokens, context) for context in contexts]
        started = self.clock()
        for context in contexts[:-1]:
            self.model.forward(self._batch([tokens], [context], logits=False), self.cache)
        self._time_prefill(tokens, contexts[-1])
        share = (self.clock() - started - alone_s[-1]) / max(sum(alone_s[:-1]), 1e-9)
        return min(1.0, max(1.0 / self.model.stages, share))

    def _time_decode(self, batch: int, context: int) -> float:
        return self._time_forward([1] * batch, [context - 1] * batch)

    def _time_forward(self, new: list[int], contexts: list[int]) -> float:
        batch = self._batch(new, contexts)
        started = self.clock()
        logits = self.model.forward(batch, self.cache)
        logits.argmax(dim=-1).tolist()  # as the engine does; waits for an accelerator too
        return self.clock() - started

    def _batch(self, new: list[int], contexts: list[int], *, logits: bool = True) -> ForwardBatch:
        blocks = [-(-(n + c) // self.cache.block_tokens) for n, c in zip(new, contexts, strict=True)]
        tables = [self._table(start * count, count) for start, count in enumerate(blocks)]
        return ForwardBatch(torch.arange(sum(new)) % self.model.vocab_size, new, contexts, tables, logits=logits)

    def _table(self, start: int, count: int) -> list[int]:
        return [(start + i) % self.cache.num_blocks for i in range(count)]

    def _time_transfers(self, transfer: Transfer) -> Iterable[TransferSample]:
        transfer(TRANSFER_BYTES[-1])
        for size in TRANSFER_BYTES:
            for _ in range(3):
                started = self.clock()
                transfer(size)
                yield TransferSample(size, max(self.clock() - started, 1e-9))


def load_profile(key: ProfileKey) -> FittedProfile | None:
    """The remembered profile, None when there is none or its file does not hold what it should."""
    if not key.path.is_file():
        return None
    try:
        stored = read_json(key.path)
        return _fitted(stored["fitted"]) if stored["key"] == asdict(key) else None
    except (ModelFileError, KeyError, TypeError):
        return None


def _fitted(values: dict[str, Any]) -> FittedProfile:
    profile = values["profile"]
    residuals = ResidualQuantiles(**profile["residuals"])
    tiers = tuple(profile["tier_bytes_per_s"])
    return FittedProfile(
        CostProfile(**{**profile, "residuals": residuals, "tier_bytes_per_s": tiers}),
        FitQuality(**values["prefill_quality"]),
        FitQuality(**values["decode_quality"]),
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
