"""Writing Mooncake JSONL: round trips, larger blocks, requests without identity."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.formats import open_trace
from traces.formats.writer import mooncake_lines, write_mooncake
from traces.schema import TraceRequest


@st.composite
def traces_of_requests(draw: st.DrawFn) -> list[TraceRequest]:
    times_ms = sorted(draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=8)))
    found = []
    for time_ms in times_ms:
        tokens = draw(st.integers(1, 3_000))
        blocks = -(-tokens // 512)
        ids = draw(st.lists(st.integers(0, 2**64 - 1), min_size=blocks, max_size=blocks))
        found.append(TraceRequest(time_ms / 1000, tokens, draw(st.integers(0, 500)), tuple(ids)))
    return found


@settings(max_examples=60)
@given(traces_of_requests(), st.sampled_from(["t", "t.gz", "t.zst"]))
def test_what_is_written_is_read_back(requests: list[TraceRequest], name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        assert len(requests) == write_mooncake(requests, path, 512)
        assert requests == list(open_trace(path, strict=True))


@settings(max_examples=80)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 25))
def test_larger_blocks_share_exactly_the_whole_ones_of_the_common_prefix(first: int, second: int, common: int) -> None:
    """Two prompts of 16-token blocks with `common` equal leading blocks share `common // 4` blocks of 64 tokens, if full."""
    lines = list(mooncake_lines([_prompt(first, common, 1_000), _prompt(second, common, 2_000)], 64))
    one, two = (json.loads(line)["hash_ids"] for line in lines)
    shared = next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    blocks = min(common, -(-first // 16), -(-second // 16))
    equal = first == second and blocks == -(-first // 16)
    assert (len(one) if equal else blocks // 4) <= shared <= -(-blocks // 4)
    assert [-(-first // 64), -(-second // 64)] == [len(one), len(two)]


def _prompt(tokens: int, common: int, own: int) -> TraceRequest:
    blocks = -(-tokens // 16)
    ids = tuple(place if place < common else own + place for place in range(blocks))
    return TraceRequest(0.0, tokens, 1, ids, 16)


def test_requests_without_identity_share_no_block() -> None:
    lines = list(mooncake_lines([TraceRequest(0.0, 2_000, 1), TraceRequest(0.0, 2_000, 1)], 512))
    ids = [each for line in lines for each in json.loads(line)["hash_ids"]]
    assert len(set(ids)) == 8


def test_block_that_is_no_multiple_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="block is 500 tokens; allowed: a multiple of the source's 512"):
        write_mooncake([TraceRequest(0.0, 512, 1, (1,))], tmp_path / "t", 500)
    assert list(tmp_path.iterdir()) == []
