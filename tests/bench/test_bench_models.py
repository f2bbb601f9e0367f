"""What the models' benchmark makes of its rounds, and how it talks to peers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench.bench_models import medians, ratio_figures
from tests.bench.peer_process import peer_process

PEER = """
import json, sys
task = json.loads(sys.argv[1])
print("loading weights")
print("READY", flush=True)
for line in sys.stdin:
    print("a library says something")
    print("RATES " + json.dumps({"prefill 512": task["rate"], "long": float(json.loads(line)["long"])}), flush=True)
"""


def test_a_peer_answers_a_round_at_a_time(tmp_path: Path) -> None:
    """Its libraries may print what they like."""
    (tmp_path / "peer.py").write_text(PEER)
    with peer_process(sys.executable, tmp_path / "peer.py", {"rate": 7.5}) as peer:
        assert peer.rates(long=True) == {"prefill 512": 7.5, "long": 1.0}
        assert peer.rates(long=False) == {"prefill 512": 7.5, "long": 0.0}


def test_a_peer_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "peer.py").write_text("import sys; sys.exit('no such model')")
    with (
        pytest.raises(RuntimeError, match=r"peer\.py failed: no such model"),
        peer_process(sys.executable, tmp_path / "peer.py", {}),
    ):
        pass


def test_ratios_are_medians_of_rounds_and_not_ratios_of_medians() -> None:
    """What is measured in the first round alone counts by that round; a bound is judged by the median."""
    names = ("prefill 512", "prefill 2048", "decode 1 at 256", "decode 8 at 256")
    ours, theirs, seconds = (2.0, 9.0, 4.0), (1.0, 3.0, 4.0), (0.1, 0.5, 0.9)
    rounds = [
        {
            "full": dict.fromkeys((*names, "prefill 8192"), mine) | {"hit_s": hit},
            "vLLM": dict.fromkeys(names, peers) | {"hit_s": 1.0},
        }
        for mine, peers, hit in zip(ours, theirs, seconds, strict=True)
    ]
    del rounds[1]["full"]["prefill 8192"], rounds[2]["full"]["prefill 8192"]
    figures = {figure.name: figure for figure in ratio_figures(rounds, ("full",), "1 thread")}
    assert figures["prefill 512: full / vLLM, 1 thread"].value == 2.0
    assert figures["prefill 512: full / vLLM, 1 thread"].holds is True
    hit = figures["64 after a hit of 2048: full / vLLM, 1 thread"]
    assert (hit.value, hit.holds) == (0.5, True)
    assert not any("llama" in name for name in figures)
    found = medians([each["full"] for each in rounds])
    assert (found["prefill 512"], found["prefill 8192"], found["hit_s"]) == (4.0, 2.0, 0.5)
