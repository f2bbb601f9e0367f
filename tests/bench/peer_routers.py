"""Other people's gateways in front of the echo backend: sglang-router (Rust) and LiteLLM's proxy (Python).

They live in an environment of their own, whose Python the environment variable `CONDUCTOR_BENCH_ROUTERS_PYTHON` names:

    python -m venv /tmp/routers && /tmp/routers/bin/pip install sglang-router 'litellm[proxy]'
    CONDUCTOR_BENCH_ROUTERS_PYTHON=/tmp/routers/bin/python python -m tests.bench gateway
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from tests.bench.served import free_port

START_S = 90.0
VARIABLE = "CONDUCTOR_BENCH_ROUTERS_PYTHON"
LITELLM_ENVIRONMENT = {
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # on loopback, for as long as the benchmark runs
}


def routers_bin() -> Path | None:
    """Where the peers' commands are; None where no Python is named that has them."""
    return Path(os.environ[VARIABLE]).parent if VARIABLE in os.environ else None


@contextmanager
def sglang_router(bin_dir: Path, backend: int) -> Iterator[int]:
    port = free_port()
    command = [str(bin_dir / "sglang-router"), "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"http://127.0.0.1:{backend}", "--policy", "round_robin", "--log-level", "warn"]
    command += ["--prometheus-port", str(free_port()), "--disable-circuit-breaker"]
    with _running(command, port, {}):
        yield port


@contextmanager
def litellm_proxy(bin_dir: Path, backend: int) -> Iterator[int]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "litellm.yaml"
        route = f"model: openai/null, api_base: 'http://127.0.0.1:{backend}/v1', api_key: none"
        config.write_text(f"model_list:\n  - model_name: 'null'\n    litellm_params: {{{route}}}\n")
        command = [str(bin_dir / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        with _running(command, port, LITELLM_ENVIRONMENT):
            yield port


@contextmanager
def _running(command: Sequence[str], port: int, environment: Mapping[str, str]) -> Iterator[None]:
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment})
        tree = psutil.Process(process.pid)
        try:
            _until_it_answers(port, process)
            yield
        except TimeoutError:
            log.seek(0)
            raise RuntimeError(f"{command[0]} did not answer:\n{log.read()[-2000:]}") from None
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in (*tree.children(recursive=True), tree):
                    each.terminate()
            process.wait(timeout=20)


def _until_it_answers(port: int, process: subprocess.Popen[bytes]) -> None:
    body = {"model": "null", "messages": [{"role": "user", "content": "x"}]}
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise TimeoutError
