"""Dataclasses to JSON values and back, driven by their type annotations.

The vocabulary of the core (events, commands, types) is closed and annotated, so one encoder built from the annotations
serves all of it: a dataclass becomes an object of its fields, a union of dataclasses gets a `kind` with the class name, an
enum its value, a tuple a list, a mapping an object with its keys as strings. Integers outside the range that every JSON
reader keeps exactly (2^53, as block hashes are) become hexadecimal strings, and floats that JSON lacks become
`"inf"`, `"-inf"` and `"nan"`. Decoding is strict: an unknown field, a missing one or a wrong type is a `CodecError` that
names the path to it.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any

EXACT_JSON_INTEGER = 2**53

Json = Any  # what json.loads returns
Encoder = Callable[[Any], Json]
Decoder = Callable[[Json, str], Any]


class CodecError(ValueError):
    """A JSON value does not describe what it should; `path` leads to the offending field."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


def encode(value: Any, annotation: Any) -> Json:
    """`value`, which has the type `annotation`, as JSON values."""
    return _encoder(annotation)(value)


def decode(data: Json, annotation: Any, path: str = "value") -> Any:
    """The inverse of `encode`. Raises `CodecError`."""
    return _decoder(annotation)(data, path)


def _members(annotation: Any) -> tuple[Any, ...] | None:
    """The members of a union, or None when `annotation` is no union."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return None


def _dataclasses_of(members: tuple[Any, ...]) -> dict[str, Any]:
    """The dataclasses among the members of a union, by class name."""
    return {member.__name__: member for member in members if isinstance(member, type) and dataclasses.is_dataclass(member)}


def _others_of(members: tuple[Any, ...], classes: dict[str, Any]) -> list[Any]:
    """What a union holds besides dataclasses and None: at most one type, and only without dataclasses."""
    others = [member for member in members if member not in classes.values() and member is not type(None)]
    if len(others) > 1 or (others and classes):
        raise TypeError(f"no encoding for a union of {members!r}; allowed: dataclasses, or one other type, and None")
    return others


@cache
def _fields(cls: type) -> tuple[tuple[str, Any, bool], ...]:
    """(name, annotation, required) of every field."""
    hints = typing.get_type_hints(cls)
    return tuple(
        (
            field.name,
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    )


def _is_enum(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Enum)


# --- encoding ---------------------------------------------------------------------------------------------------------


@cache
def _encoder(annotation: Any) -> Encoder:
    members = _members(annotation)
    if members is not None:
        return _union_encoder(members)
    if dataclasses.is_dataclass(annotation):
        return _dataclass_encoder(annotation)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return _tuple_encoder(args)
    if origin in (dict, Mapping):
        return _mapping_encoder(args[1])
    if _is_enum(annotation):
        return lambda value: value.value
    return _scalar_encoder(annotation)


def _scalar_encoder(annotation: Any) -> Encoder:
    encoders: dict[Any, Encoder] = {
        int: _encode_int,
        float: _encode_float,
        bool: lambda value: value,
        str: lambda value: value,
        type(None): lambda value: value,
    }
    if annotation not in encoders:
        raise TypeError(f"no encoding for {annotation!r}; allowed: dataclass, enum, union, tuple, mapping, {list(encoders)}")
    return encoders[annotation]


def _encode_int(value: int) -> Json:
    return value if -EXACT_JSON_INTEGER <= value <= EXACT_JSON_INTEGER else hex(value)


def _encode_float(value: float) -> Json:
    return value if math.isfinite(value) else str(value)


def _dataclass_encoder(cls: Any) -> Encoder:
    fields = _fields(cls)
    encoders: list[tuple[str, Encoder]] = []  # filled on first use, so that recursive types resolve

    def encoder(value: Any) -> Json:
        if not encoders:
            encoders.extend((name, _encoder(annotation)) for name, annotation, _ in fields)
        return {name: encode_field(getattr(value, name)) for name, encode_field in encoders}

    return encoder


def _union_encoder(members: tuple[Any, ...]) -> Encoder:
    classes = _dataclasses_of(members)
    others = _others_of(members, classes)

    def encoder(value: Any) -> Json:
        if value is None:
            return None
        if others:
            return _encoder(others[0])(value)
        kind = type(value).__name__
        if kind not in classes:
            raise TypeError(f"{kind} is none of {sorted(classes)}")
        body = _encoder(classes[kind])(value)
        return body if len(classes) == 1 else {"kind": kind, **body}

    return encoder


def _tuple_encoder(args: tuple[Any, ...]) -> Encoder:
    if len(args) == 2 and args[1] is Ellipsis:
        item = _encoder(args[0])
        return lambda value: [item(entry) for entry in value]
    items = [_encoder(arg) for arg in args]
    return lambda value: [item(entry) for item, entry in zip(items, value, strict=True)]


def _mapping_encoder(value_type: Any) -> Encoder:
    item = _encoder(value_type)
    return lambda value: {str(key.value if isinstance(key, Enum) else key): item(entry) for key, entry in value.items()}


# --- decoding ---------------------------------------------------------------------------------------------------------


@cache
def _decoder(annotation: Any) -> Decoder:
    members = _members(annotation)
    if members is not None:
        return _union_decoder(members)
    if dataclasses.is_dataclass(annotation):
        return _dataclass_decoder(annotation)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return _tuple_decoder(args)
    if origin in (dict, Mapping):
        return _mapping_decoder(args)
    if _is_enum(annotation):
        return _enum_decoder(annotation)
    return _scalar_decoder(annotation)


def _expect(data: Json, kind: type | tuple[type, ...], path: str, allowed: str) -> None:
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise CodecError(path, f"{data!r} is not allowed; expected {allowed}")


def _scalar_decoder(annotation: Any) -> Decoder:
    decoders: dict[Any, Decoder] = {
        int: _decode_int,
        float: _decode_float,
        bool: _plain_decoder(bool, "true or false"),
        str: _plain_decoder(str, "a string"),
        type(None): _plain_decoder(type(None), "null"),
    }
    return decoders[annotation]


def _plain_decoder(kind: type, allowed: str) -> Decoder:
    def decoder(data: Json, path: str) -> Any:
        _expect(data, kind, path, allowed)
        return data

    return decoder


def _decode_int(data: Json, path: str) -> int:
    _expect(data, (int, str), path, "an integer, or a hexadecimal string")
    if isinstance(data, int):
        return data
    try:
        return int(data, 0)
    except ValueError:
        raise CodecError(path, f"{data!r} is not allowed; expected an integer, or a hexadecimal string") from None


def _decode_float(data: Json, path: str) -> float:
    allowed = 'a number, "inf", "-inf" or "nan"'
    _expect(data, (int, float, str), path, allowed)
    if isinstance(data, str) and data not in ("inf", "-inf", "nan"):
        raise CodecError(path, f"{data!r} is not allowed; expected {allowed}")
    return float(data)


def _enum_decoder(cls: Any) -> Decoder:
    by_value = {member.value: member for member in cls}

    def decoder(data: Json, path: str) -> Any:
        if isinstance(data, bool) or not isinstance(data, int | str) or data not in by_value:
            raise CodecError(path, f"{data!r} is not allowed; expected one of {list(by_value)}")
        return by_value[data]

    return decoder


def _dataclass_decoder(cls: Any) -> Decoder:
    fields = {name: (annotation, required) for name, annotation, required in _fields(cls)}

    def decoder(data: Json, path: str) -> Any:
        _expect(data, dict, path, f"an object with the fields of {cls.__name__}")
        unknown = sorted(data.keys() - fields.keys())
        if unknown:
            raise CodecError(f"{path}.{unknown[0]}", f"{cls.__name__} has no such field; allowed: {list(fields)}")
        missing = [name for name, (_, required) in fields.items() if required and name not in data]
        if missing:
            raise CodecError(f"{path}.{missing[0]}", f"missing; {cls.__name__} needs it")
        return cls(**{name: _decoder(fields[name][0])(value, f"{path}.{name}") for name, value in data.items()})

    return decoder


def _union_decoder(members: tuple[Any, ...]) -> Decoder:
    classes = _dataclasses_of(members)
    others = _others_of(members, classes)
    nullable = type(None) in members

    def decoder(data: Json, path: str) -> Any:
        if data is None and nullable:
            return None
        if others:
            return _decoder(others[0])(data, path)
        _expect(data, dict, path, f"an object of kind {sorted(classes)}")
        if len(classes) == 1:
            return _decoder(next(iter(classes.values())))(data, path)
        kind = data.get("kind")
        if not isinstance(kind, str) or kind not in classes:
            raise CodecError(f"{path}.kind", f"{kind!r} is not allowed; expected one of {sorted(classes)}")
        return _decoder(classes[kind])({key: value for key, value in data.items() if key != "kind"}, path)

    return decoder


def _tuple_decoder(args: tuple[Any, ...]) -> Decoder:
    repeated = len(args) == 2 and args[1] is Ellipsis

    def decoder(data: Json, path: str) -> Any:
        _expect(data, list, path, "a list" if repeated else f"a list of {len(args)}")
        if not repeated and len(data) != len(args):
            raise CodecError(path, f"{len(data)} entries are not allowed; expected {len(args)}")
        kinds = [args[0]] * len(data) if repeated else args
        return tuple(_decoder(kind)(entry, f"{path}[{i}]") for i, (kind, entry) in enumerate(zip(kinds, data, strict=True)))

    return decoder


def _mapping_decoder(args: tuple[Any, ...]) -> Decoder:
    key_type, value_type = args

    def decode_key(text: str, path: str) -> Any:
        if _is_enum(key_type):
            by_text = {str(member.value): member for member in key_type}
            if text not in by_text:
                raise CodecError(path, f"key {text!r} is not allowed; expected one of {list(by_text)}")
            return by_text[text]
        return _decode_int(text, path) if key_type is int else text

    def decoder(data: Json, path: str) -> Any:
        _expect(data, dict, path, "an object")
        return {decode_key(key, path): _decoder(value_type)(value, f"{path}.{key}") for key, value in data.items()}

    return decoder
