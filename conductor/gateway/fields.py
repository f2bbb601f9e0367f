"""Building blocks of the request schemas: fields that are checked by hand for a clear message, and fields that are known but
not supported, which are accepted with a neutral value and refused with any other.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 128
Prompt: TypeAlias = str | tuple[int, ...]


def refuse(code: str, allowed: str) -> PydanticCustomError:
    """A validation error whose message is what is allowed."""
    return PydanticCustomError(code, "{allowed}", {"allowed": allowed})  # a template, in which words with braces fill a place


def only(*neutral: object) -> AfterValidator:
    """Marks a field that means nothing here: any of `neutral` is accepted, everything else is not supported."""
    words = ", ".join(map(json.dumps, neutral))

    def check(value: object) -> object:
        if any(type(value) is type(known) and value == known for known in neutral):
            return value
        raise refuse("unsupported", f"this field is not supported; leave it out or send {words}")

    return AfterValidator(check)


def is_token(value: object) -> bool:
    return type(value) is int


def parse_prompt(value: object) -> tuple[Prompt, ...]:
    """The four forms of `prompt`: a text, token ids, texts, lists of token ids."""
    allowed = f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either"
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise refuse("prompt_type", allowed)
    if all(map(is_token, value)):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise refuse("prompt_count", allowed)
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and item and all(map(is_token, item)) for item in value):
        return tuple(tuple(item) for item in value)
    raise refuse("prompt_type", allowed)


def parse_stop(value: object) -> tuple[str, ...]:
    allowed = f"a string of 1 to {MAX_STOP_CHARS} characters, or up to {MAX_STOPS} of them"
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise refuse("stop_type", allowed)
    if not all(isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise refuse("stop_type", allowed)
    return tuple(stops)


def parse_content(value: object) -> str:
    """Text, or the OpenAI list of content parts as far as they are text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse("content_type", 'a string or a list of parts {"type": "text", "text": ...}')
    return "".join(map(_part_text, value))


def _part_text(part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) and len(part) == 2:
        return str(part["text"])
    raise refuse("content_part", 'parts of the form {"type": "text", "text": "..."} and no other kind')


INTEGERS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
PROMPT_SCHEMA: dict[str, Any] = {
    "oneOf": [
        {"type": "string"},
        INTEGERS,
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": INTEGERS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
STOP_TEXT: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
STOP_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "null"}, STOP_TEXT, {"type": "array", "items": STOP_TEXT, "maxItems": MAX_STOPS}]
}
TEXT_PART: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
CONTENT_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]}

Prompts = Annotated[tuple[Prompt, ...], PlainValidator(parse_prompt), WithJsonSchema(PROMPT_SCHEMA)]
Stops = Annotated[tuple[str, ...], PlainValidator(parse_stop), WithJsonSchema(STOP_SCHEMA)]
Content = Annotated[str, PlainValidator(parse_content), WithJsonSchema(CONTENT_SCHEMA)]
