"""The whole live path on the default model: what a prefix hit saves, what the path adds, how well TTFT is foreseen.

Starts `conductor serve` with its defaults (2 prefill + 1 decode workers) on this machine.
"""

from __future__ import annotations

import random
import statistics
import threading

from tests.bench.harness import Figure, Report, at_most
from tests.bench.in_process import first_token_s
from tests.bench.served import FirstToken, Served, serve

PREFIX_TOKENS = 2048
NEW_TOKENS = 64
OVERHEAD_PROMPT_TOKENS = 256
GIB = 2**30


def tokens(count: int, seed: object) -> list[int]:
    """Reproducible ordinary token ids of the default model (special ids lie below 1,000)."""
    draw = random.Random(repr(seed))
    return [draw.randrange(1000, 45000) for _ in range(count)]


def hit_against_miss(served: Served, rounds: int = 3) -> tuple[float, float]:
    """Median TTFT of a hit over that of its miss: on the holder, and on the other worker after a pull."""
    same, moved = [], []
    for round_number in range(rounds):
        prefix = tokens(PREFIX_TOKENS, ("prefix", round_number))
        miss = served.complete(prefix + tokens(NEW_TOKENS, ("first", round_number)))
        hit = served.complete(prefix + tokens(NEW_TOKENS, ("second", round_number)))
        if hit.worker == miss.worker and hit.hit_tokens >= PREFIX_TOKENS:
            same.append(hit.ttft_s / miss.ttft_s)
        moved += [pulled.ttft_s / miss.ttft_s for pulled in pulls(served, prefix, miss.worker, round_number)]
    if not same or not moved:
        raise RuntimeError(f"hits on the holder: {len(same)}, on another worker: {len(moved)}; both are needed")
    return statistics.median(same), statistics.median(moved)


def pulls(served: Served, prefix: list[int], holder: str, round_number: int) -> list[FirstToken]:
    """Two hits at once: the holder can serve one of them, so the other goes to its peer with the prefix pulled."""
    seen: list[FirstToken] = []

    def ask(number: int) -> None:
        seen.append(served.complete(prefix + tokens(NEW_TOKENS, ("burst", round_number, number))))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answer for answer in seen if answer.worker != holder and answer.hit_tokens >= PREFIX_TOKENS]


def overhead_ms(served: Served, rounds: int = 15) -> tuple[float, float, float]:
    """Median TTFT through the gateway less the engine's own in this process; both in milliseconds too."""
    through, alone = [], []
    for round_number in range(rounds):
        prompt = tokens(OVERHEAD_PROMPT_TOKENS, ("overhead", round_number))
        through.append(served.complete(prompt).ttft_s)
        alone.append(first_token_s(prompt))
    through_ms, alone_ms = 1000 * statistics.median(through), 1000 * statistics.median(alone)
    return through_ms - alone_ms, through_ms, alone_ms


def estimate_errors(served: Served) -> list[float]:
    """|predicted - actual| / actual on the idle cluster, over lengths 128 to 4096 and hits 0 to 95 %."""
    errors = []
    for length in (128, 256, 512, 1024, 2048, 4096):
        base = tokens(length, ("estimate", length))
        for share in (0.0, 0.25, 0.5, 0.75, 0.95):
            kept = int(length * share)
            answer = served.complete(base[:kept] + tokens(length - kept, ("tail", length, share)))
            errors.append(abs(answer.predicted_s - answer.ttft_s) / answer.ttft_s)
            if share == 0.0:
                served.complete(base)
    return errors


def run() -> Report:
    with serve():
        pass  # the first start compiles and profiles where nobody has yet; the next one is warm
    with serve() as served:
        served.complete(tokens(300, "warm-up"))
        same, moved = hit_against_miss(served)
        extra_ms, through_ms, alone_ms = overhead_ms(served)
        errors = estimate_errors(served)
        resident, proportional = served.resident_bytes(), served.proportional_bytes()
        ready_s = served.ready_s
    figures = [
        at_most("hit_over_miss_same_worker", same, 0.1, "ratio", f"{PREFIX_TOKENS} reused + {NEW_TOKENS} new tokens"),
        at_most("hit_over_miss_after_pull", moved, 0.1, "ratio", "the prefix pulled from its holder"),
        at_most(
            "overhead_p50_ms", extra_ms, 25, "ms", f"{through_ms:.0f} ms through the gateway, {alone_ms:.0f} ms in process"
        ),
        at_most("estimate_error_p50", statistics.median(errors), 0.2, "ratio", f"{len(errors)} prompts of 128 to 4,096 tokens"),
        Figure("estimate_error_max", max(errors), "ratio"),
        at_most("warm_ready_s", ready_s, 40, "s", "cached model and profile"),
        at_most("resident_gib", proportional / GIB, 8, "GiB", "each page once, however many processes share it"),
        Figure("resident_summed_gib", resident / GIB, "GiB", "shared pages counted in each process"),
    ]
    return Report("first_light", figures, "python -m tests.bench first_light")
