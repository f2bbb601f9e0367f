"""Text and tokens: round trips, streaming text, chat templates, and what the fingerprint tells apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import ModelFileError
from models.folder import load_card, load_tokenizer
from models.load import LoadedModel
from models.pull import DEFAULT_MODEL
from models.tokenizer import ChatTemplateError, Detokenizer, TextTokenizer, load_tokenizer_folder
from tests.models.builders import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}{% endif %}\n"
    "{{ m.role }}: {{ m.content }};{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def smollm() -> TextTokenizer:
    return load_tokenizer(DEFAULT_MODEL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    return tmp_path


# The default model's vocabulary lacks the bytes of some control characters and of planes without assigned characters.
ASSIGNED = st.characters(exclude_categories=("Cc", "Cn", "Co", "Cs"), include_characters="\n\t\r")


@given(st.text(ASSIGNED))
@settings(max_examples=100)
def test_text_survives_a_round_trip(smollm: TextTokenizer, text: str) -> None:
    assert smollm.decode(smollm.encode(text), keep_special=True) == text


@given(st.text(alphabet=st.sampled_from("aé€😀𝔘नि\u200d👩‍👩‍👧 \n1")))
@settings(max_examples=100)
def test_streamed_text_is_the_decoded_text_without_broken_characters(smollm: TextTokenizer, text: str) -> None:
    """Pieces add up to the whole, and none of them holds part of a character."""
    detokenizer = smollm.detokenizer()
    pieces = [detokenizer.add(token) for token in smollm.encode(text)]
    assert "�" not in "".join(pieces)
    assert "".join(pieces) + detokenizer.finish() == text


# `byte_tokenizer` numbers the printable bytes first.
BYTE_IDS = {b: i + 2 for i, b in enumerate(sorted(range(256), key=lambda b: (not (33 <= b <= 126 or 161 <= b != 173), b)))}


@given(st.binary(max_size=24))
@settings(max_examples=150)
def test_any_stream_of_bytes_adds_up_to_its_decoding(data: bytes) -> None:
    """Also bytes that are no text at all come out as `decode` shows them, as soon as they are certain."""
    tokenizer = TextTokenizer(byte_tokenizer(), [], None, {})
    ids = [BYTE_IDS[byte] for byte in data]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in ids]
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(ids) == data.decode("utf-8", errors="replace")


def test_a_character_of_several_tokens_comes_with_its_last_one(smollm: TextTokenizer) -> None:
    """A rare emoji takes several byte tokens: nothing, nothing, then the character."""
    ids = smollm.encode("🦥")
    detokenizer = smollm.detokenizer()
    pieces = [detokenizer.add(token) for token in ids]
    assert len(ids) > 1
    assert pieces == [""] * (len(ids) - 1) + ["🦥"]


def test_an_incomplete_character_at_the_end_is_shown_as_replacement(smollm: TextTokenizer) -> None:
    detokenizer = smollm.detokenizer()
    assert detokenizer.add(smollm.encode("🦥")[0]) == ""
    assert detokenizer.finish() == "�"


def test_digits_are_single_tokens_in_the_default_model(smollm: TextTokenizer) -> None:
    assert [smollm.token_text(token) for token in smollm.encode("x2026")] == ["x", "2", "0", "2", "6"]


def test_special_tokens_are_found_in_text_and_hidden_from_output(smollm: TextTokenizer) -> None:
    """The markers of a turn are one token each; decoding leaves them out unless told otherwise."""
    ids = smollm.encode("<|im_start|>hi<|im_end|>")
    assert (len(ids), ids[-1]) == (3, 2)
    assert (smollm.decode(ids), smollm.decode(ids, keep_special=True)) == ("hi", "<|im_start|>hi<|im_end|>")
    assert smollm.eos_ids == (2, 0)


def test_the_default_chat_template_marks_turns(smollm: TextTokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert expected == smollm.render_chat(messages)
    assert expected.removesuffix("<|im_start|>assistant\n") == smollm.render_chat(messages, continue_as_assistant=False)
    assert smollm.encode_chat(messages) == smollm.encode(expected)


def test_a_template_may_use_tools_and_refuse_messages(folder: Path) -> None:
    tokenizer = load_tokenizer_folder(folder)
    text = tokenizer.render_chat([{"role": "user", "content": "Hi"}], tools=[{"name": "größe"}])
    assert text == 'user: Hi;[{"name": "größe"}]assistant:'
    with pytest.raises(ChatTemplateError, match="no role judge"):
        tokenizer.render_chat([{"role": "judge", "content": "Hi"}])


@pytest.mark.parametrize("messages", [[{"content": "no role"}], [{"role": "user"}, "text"]])
def test_malformed_messages_are_a_template_error(smollm: TextTokenizer, messages: list[dict[str, str]]) -> None:
    with pytest.raises(ChatTemplateError, match="do not fit"):
        smollm.render_chat(messages)


def test_a_template_cannot_reach_python(folder: Path) -> None:
    """The template is data from a file: the sandbox stops it from touching the interpreter."""
    template = "{{ messages.__class__.__mro__ }}"
    tokenizer = TextTokenizer(byte_tokenizer(), [], template, {})
    with pytest.raises(ChatTemplateError, match="unsafe"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_a_model_without_template_says_so() -> None:
    tokenizer = TextTokenizer(byte_tokenizer(), [], None, {})
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render_chat([])


def test_eos_ids_are_gathered_from_every_file(folder: Path) -> None:
    assert load_tokenizer_folder(folder).eos_ids == (5, 9)


def test_fingerprints_tell_tokenizers_apart(folder: Path, smollm: TextTokenizer) -> None:
    same, again = load_tokenizer_folder(folder).fingerprint, load_tokenizer_folder(folder).fingerprint
    assert same == again
    assert len({same, smollm.fingerprint, TextTokenizer(byte_tokenizer(), [], None, {}).fingerprint}) == 3


def test_a_damaged_or_missing_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is damaged"):
        load_tokenizer_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is missing"):
        load_tokenizer_folder(folder)


def test_the_card_tells_sizes_and_namespace_without_the_weights(default_model: LoadedModel) -> None:
    card = load_card(DEFAULT_MODEL)
    assert card == default_model.card
    assert (card.max_context, card.vocab_size, card.kv_bytes_per_token) == (8192, 49152, 46_080)
    half = load_card(DEFAULT_MODEL, "bfloat16")
    assert half.kv_bytes_per_token == 23_040
    assert half.namespace != card.namespace
    assert default_model.model.layout.bytes_per_token == card.kv_bytes_per_token
