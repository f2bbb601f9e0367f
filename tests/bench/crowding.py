"""How much slower a prefill step is while every processor of this machine computes one, and what else takes processor time."""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import psutil
import torch

from models.base import CausalLM
from models.load import load_model
from models.pull import DEFAULT_MODEL
from tests.bench.bench_models import prefill_s
from tests.bench.served import Served

PROMPT_TOKENS, ROUNDS = 512, 5
WORKERS = ("ray::PrefillWorker", "ray::DecodeWorker")
_model: CausalLM  # of a process of the pool


def crowding() -> float:
    """The median step of as many processes as there are processors, all at once, over that of one by itself."""
    alone, together = (step_s(processes) for processes in (1, os.cpu_count() or 1))
    return max(1.0, together / alone)


def step_s(processes: int) -> float:
    """The median seconds of a prefill step in so many processes that compute side by side."""
    found: list[float] = []
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_load) as pool:
        for number in range(1 + ROUNDS):
            steps = [pool.submit(_step) for _ in range(processes)]
            seconds = [step.result() for step in steps]
            found += seconds if number else []  # the first is late by the loading
    return statistics.median(found)


def _load() -> None:
    global _model
    torch.set_num_threads(1)
    _model = load_model(DEFAULT_MODEL).model


def _step() -> float:
    began_s = time.perf_counter()
    prefill_s(_model, PROMPT_TOKENS)
    return time.perf_counter() - began_s


def overhead_cpu_s(served: Served) -> float:
    """Processor seconds so far of this process and of all that serves but the workers: gateway, Conductor, Ray."""
    used = sum(os.times()[:2])
    for process in served.tree():
        try:
            if not process.cmdline()[0].startswith(WORKERS):
                used += sum(process.cpu_times()[:2])
        except (psutil.Error, IndexError):  # it has just ended
            continue
    return used
