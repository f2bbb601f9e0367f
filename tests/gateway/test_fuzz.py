"""Whatever a client sends, the answer is in the 200s or 400s and has the right shape."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conductor.gateway.schemas import ChatBody, CompletionBody
from tests.gateway.conftest import MODEL, Live

FIELDS = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "unknown"})
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=10)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
likely = values | st.sampled_from([MODEL, "user", [1, 2], [[1], [2]], ["a", "b"], {"include_usage": True}, 0, 1, 0.5, True])
bodies = st.dictionaries(st.sampled_from(FIELDS), likely, max_size=6)
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "x"},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
}


@given(path=st.sampled_from(sorted(GOOD)), body=bodies, complete=st.booleans())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_breaks_the_gateway(live: Live, path: str, body: dict[str, Any], complete: bool) -> None:
    sent = {**GOOD[path], **body} if complete else body
    answer = live.client.post(path, content=json.dumps(sent).encode(errors="surrogatepass"))
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]


@given(raw=st.binary(max_size=200), path=st.sampled_from(sorted(GOOD)))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_break_the_gateway(live: Live, raw: bytes, path: str) -> None:
    assert live.client.post(path, content=raw).status_code == 400
