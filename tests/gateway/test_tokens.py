"""Tokenizing without generating."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import CONTEXT, Live


def test_a_prompt_becomes_token_ids(live: Live) -> None:
    answer = live.post("/tokenize", {"prompt": "hi"}).json()
    assert answer == {"count": 3, "max_model_len": CONTEXT, "tokens": [257, 104, 105], "token_strs": None}
    bare = live.post("/tokenize", {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True}).json()
    assert (bare["tokens"], bare["token_strs"]) == ([104, 105], ["h", "i"])


def test_a_conversation_is_rendered_first(live: Live) -> None:
    """The same tokens as a chat completion would have."""
    live.chat("hey")
    answer = live.post("/tokenize", {"messages": [{"role": "user", "content": "hey"}]}).json()
    assert answer["count"] == live.engine.jobs[0].request.prompt_tokens


def test_token_ids_become_text(live: Live) -> None:
    assert live.post("/detokenize", {"tokens": [104, 105]}).json() == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x", "model": "other"}),
        ("/tokenize", {"prompt": 3}),
        ("/detokenize", {"tokens": [258]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "hi"}),
        ("/detokenize", {"tokens": [1], "token": 1}),
    ],
)
def test_wrong_bodies_are_explained(live: Live, path: str, body: dict[str, Any]) -> None:
    answer = live.post(path, body)
    assert answer.status_code == 400
    assert "allowed" in answer.json()["error"]["message"]
