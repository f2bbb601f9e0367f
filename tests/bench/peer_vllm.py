"""vLLM's CPU build on the default model as a Hugging Face folder, run by the peer's Python: a round of rates a line of input.

`python peer_vllm.py TASK`, for example {"folder": PATH, "prefill": [512], "decode": [[1, 256]], "steps": 32, "hit": [2048, 64],
"threads": 2, "clock": "wall"}

See `peer_process.py`. Rates are differences between requests that share everything else, so that what does not depend on them
falls out: decode is the time of `steps` further tokens, and its prompts are cached when they are timed.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

task = json.loads(sys.argv[1])
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(task["threads"])}  # one process: its clock is all
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{task['threads'] - 1}"

from vllm import LLM, SamplingParams  # noqa: E402 - it reads the environment when it is imported


def main() -> None:
    draw = random.Random(0)
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[task["clock"]]
    model = LLM(task["folder"], dtype="float32", max_model_len=8192, max_num_seqs=16, enable_prefix_caching=True)

    def prompt(count: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [draw.randrange(1000, 45000) for _ in range(count)]}

    def seconds(prompts: list[dict[str, list[int]]], new_tokens: int) -> float:
        rules = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        started = clock()
        model.generate(prompts, rules, use_tqdm=False)
        return clock() - started

    def round_of_rates() -> dict[str, float]:
        figures = {f"prefill {count}": count / seconds([prompt(count)], 1) for count in task["prefill"]}
        prefix, new = task["hit"]
        shared = prompt(prefix)["prompt_token_ids"]
        seconds([{"prompt_token_ids": [*shared, 5]}], 1)
        figures["hit_s"] = min(seconds([{"prompt_token_ids": shared + prompt(new)["prompt_token_ids"]}], 1) for _ in range(2))
        for batch, context in task["decode"]:
            prompts = [prompt(context) for _ in range(batch)]
            seconds(prompts, 1)
            further = min(seconds(prompts, task["steps"] + 1) for _ in range(2)) - min(seconds(prompts, 1) for _ in range(2))
            figures[f"decode {batch} at {context}"] = batch * task["steps"] / further
        return figures

    seconds([prompt(64)], 4)
    print("READY", flush=True)
    for _ in sys.stdin:
        print("RATES " + json.dumps(round_of_rates()), flush=True)


if __name__ == "__main__":
    main()
