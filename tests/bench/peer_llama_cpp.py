"""llama.cpp on the default model's own file, run by the peer's Python: a round of prefill and decode rates a line of input.

`python peer_llama_cpp.py '{"gguf": PATH, "threads": 2, "clock": "wall", "prefill": [512], "decode": [256], "steps": 16}'`
See `peer_process.py`. The longest prefill is left out of rounds that are not long.
"""

from __future__ import annotations

import json
import random
import sys
import time

from llama_cpp import Llama

task = json.loads(sys.argv[1])
draw = random.Random(0)
clock = {"wall": time.perf_counter, "cpu": time.process_time}[task["clock"]]
model = Llama(
    task["gguf"],
    n_ctx=8256,
    n_batch=512,
    n_ubatch=512,
    n_threads=task["threads"],
    n_threads_batch=task["threads"],
    verbose=False,
)


def tokens(count: int) -> list[int]:
    return [draw.randrange(1000, 45000) for _ in range(count)]


def prefill_tokens_per_s(count: int) -> float:
    model.reset()
    started = clock()
    model.eval(tokens(count))
    return count / (clock() - started)


def decode_tokens_per_s(context: int) -> float:
    model.reset()
    model.eval(tokens(context))
    times = []
    for token in tokens(task["steps"]):
        started = clock()
        model.eval([token])
        times.append(clock() - started)
    return 1 / min(times)


prefill_tokens_per_s(64)
print("READY", flush=True)
for line in sys.stdin:
    lengths = task["prefill"] if json.loads(line)["long"] else task["prefill"][:-1]
    figures = {f"prefill {count}": prefill_tokens_per_s(count) for count in lengths}
    figures |= {f"decode 1 at {context}": decode_tokens_per_s(context) for context in task["decode"]}
    print("RATES " + json.dumps(figures), flush=True)
