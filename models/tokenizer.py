"""Text to token ids and back, chat messages to text. Torch-free: the gateway imports this module.

A `TextTokenizer` is made from a folder with tokenizer.json (and, if there, tokenizer_config.json, generation_config.json,
chat_template.jinja). A `Detokenizer` turns one stream of ids into text piece by piece and never emits part of a character.
The fingerprint names everything that maps text to ids, so that KV computed under one tokenizer is never found under another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from models.cache import read_json
from models.errors import ModelFileError

_REPLACEMENT = "�"


class ChatTemplateError(ValueError):
    """The messages cannot be rendered: the model has no chat template, or the template refuses them."""


class TextTokenizer:
    """The tokenizer of one model. `eos_ids`: tokens that end generation; `fingerprint`: names the mapping text to ids."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], template: str | None, names: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._template = None if template is None else _environment().from_string(template)
        self._names = dict(names)
        self.eos_ids = tuple(eos_ids)
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        digest = hashlib.sha256(tokenizer.to_str().encode())
        digest.update((template or "").encode())
        self.fingerprint = digest.hexdigest()[:32]

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`. `special`: with those that the model wants around a plain prompt; not for rendered chats."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not keep_special))

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones by name; a part of a character shows as U+FFFD."""
        return self.decode([token_id], keep_special=True)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, continue_as_assistant: bool = True, **extra: Any) -> str:
        """The prompt text of a conversation. `extra` (tools, say) is handed to the template. Raises `ChatTemplateError`."""
        if self._template is None:
            raise ChatTemplateError("this model has no chat template; use completions")
        values = {**self._names, **extra, "messages": messages, "add_generation_prompt": continue_as_assistant}
        try:
            return self._template.render(values)
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ChatTemplateError(f"messages do not fit the model's chat template: {error}") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **extra: Any) -> list[int]:
        return self.encode(self.render_chat(messages, **extra), special=False)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self)


class Detokenizer:
    """Text of one stream of ids. What `add` and `finish` return, put together, is `decode` of all the ids."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # ids whose text is out, kept for decoders that look at their left neighbour
        self._pending: list[int] = []
        self._emitted = 0  # characters of the pending text that are out

    def add(self, token_id: int) -> str:
        """The text that becomes certain with this token; empty while a character is incomplete."""
        self._pending.append(token_id)
        text = self._text()
        # An incomplete character decodes to one U+FFFD at the very end; all before it is final.
        certain = text[:-1] if text.endswith(_REPLACEMENT) else text
        piece = certain[self._emitted :]
        self._emitted = max(self._emitted, len(certain))
        if certain is text:
            self._context, self._pending, self._emitted = self._pending, [], 0
        return piece

    def finish(self) -> str:
        """What is left when the stream ends: an incomplete character as U+FFFD, or nothing."""
        return self._text()[self._emitted :]

    def _text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]


def load_tokenizer_folder(folder: Path) -> TextTokenizer:
    """The tokenizer of a model folder. Raises `ModelFileError` naming the file that is missing or damaged."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFileError(f"{path} is missing")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{path} is damaged: {error}") from error
    config = _optional_json(folder / "tokenizer_config.json")
    names = {
        role: _token_name(config[role]) for role in ("bos_token", "eos_token", "unk_token", "pad_token") if config.get(role)
    }
    return TextTokenizer(tokenizer, _eos_ids(folder, tokenizer, names), _chat_template(folder, config), names)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token_name(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _eos_ids(folder: Path, tokenizer: Tokenizer, names: Mapping[str, str]) -> list[int]:
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(folder / name).get("eos_token_id")
        if value is not None:
            found.extend(value if isinstance(value, list) else [value])
    named = tokenizer.token_to_id(names["eos_token"]) if "eos_token" in names else None
    if named is not None:
        found.append(named)
    return list(dict.fromkeys(found))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
