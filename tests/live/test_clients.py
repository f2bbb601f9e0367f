"""Clients that people use, on the real service: LangChain's, the official one for JavaScript, and two load generators.

The load generators pin what we do not, so each lives in an environment of its own, whose Python an environment variable names;
`clients/` says how to make one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from models.folder import find_model
from tests.bench.served import Served
from tests.live.observe import MODEL, eventually, metric

pytestmark = [pytest.mark.live, pytest.mark.slow]

CLIENTS = Path(__file__).parent / "clients"
NPM_CLIENT = "openai@7"
AIPERF_PYTHON, VLLM_PYTHON = "CONDUCTOR_TEST_AIPERF_PYTHON", "CONDUCTOR_TEST_VLLM_PYTHON"
QUESTION = "What is the capital of France?"


@pytest.fixture
def chat(served: Served) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"http://127.0.0.1:{served.port}/v1",
        api_key=SecretStr("none"),
        model=MODEL,
        temperature=0,
        max_completion_tokens=16,
        max_retries=0,
        stream_usage=True,
    )


def test_langchain_answers_with_usage(chat: ChatOpenAI) -> None:
    answer = chat.invoke([SystemMessage("You answer in one sentence."), HumanMessage(QUESTION)])
    assert "Paris" in str(answer.content)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


def test_langchain_streams_what_it_answers(chat: ChatOpenAI) -> None:
    pieces = list(chat.stream(QUESTION))
    assert "".join(str(piece.content) for piece in pieces) == chat.invoke(QUESTION).content
    assert len(pieces) > 3
    assert sum((piece.usage_metadata or {"output_tokens": 0})["output_tokens"] for piece in pieces) > 0


async def test_langchain_asks_several_at_once(chat: ChatOpenAI) -> None:
    """Each gets its own answer, the one that it gets alone."""
    questions = [QUESTION, "Name three colours."]
    answers = await chat.abatch(questions)
    assert "Paris" in str(answers[0].content)
    assert answers[1].content == (await chat.ainvoke(questions[1])).content


def test_the_javascript_client(served: Served, tmp_path: Path) -> None:
    """Models, whole and streamed chat, a completion with its headers, a client that leaves, and an error of its own class."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("Node.js with npm is not installed")
    install = [npm, "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(tmp_path), NPM_CLIENT]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    script = shutil.copy(CLIENTS / "openai_client.mjs", tmp_path)
    command = [node, script, f"http://127.0.0.1:{served.port}/v1", MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["models"] == [MODEL]
    assert "Paris" in seen["whole"]
    assert seen["streamed"] == seen["whole"]
    assert seen["streamedUsage"] == seen["usage"] > 0
    assert "Paris" in seen["completion"]
    assert seen["decision"]
    assert seen["left"]
    assert seen["refused"] == ["BadRequestError", 400, "model_not_found", "model"]
    eventually(lambda: metric(served, "conductor_cluster_in_flight") == 0, within_s=20)


def python_of(variable: str) -> Path:
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set")
    return Path(os.environ[variable])


def run_client(*command: str | Path, **environment: str) -> None:
    """Exit code 0, with the local tokenizer as the last argument, and nothing of ours on the path."""
    everything = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    line = [*command, find_model(MODEL).path]
    done = subprocess.run(line, env=everything, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_aiperf_completes_every_request(served: Served, tmp_path: Path) -> None:
    """Streamed chat; its own count of tokens is the one that it asked for."""
    aiperf = python_of(AIPERF_PYTHON).with_name("aiperf")
    run_client(CLIENTS / "aiperf.sh", aiperf, f"http://127.0.0.1:{served.port}", AIPERF_OUT=str(tmp_path))
    figures = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert (figures["request_count"]["avg"], figures["request_error_rate"]["avg"], figures["error_summary"]) == (12, 0, [])
    assert figures["usage_completion_tokens"]["min"] == figures["usage_completion_tokens"]["max"] == 16


def test_vllm_s_benchmark_completes_every_request(served: Served) -> None:
    """Streamed completions; the script itself looks whether all have completed."""
    run_client(python_of(VLLM_PYTHON), CLIENTS / "vllm_bench.py", f"http://127.0.0.1:{served.port}")
