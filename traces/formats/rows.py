"""One row of a trace file with checked access to its fields.

Every refusal names file, line, field, value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from traces.schema import Fault, SkipReason, TraceError

MAX_TOKENS = 100_000_000
MAX_TIME_S = 1e11
MAX_ID = (1 << 64) - 1
MAX_SHOWN_CHARS = 60


def shown(value: object) -> str:
    """`value` as an error message shows it: cut when long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


@dataclass(frozen=True, slots=True)
class Row:
    """The fields of one line: JSON values, or strings when they come from CSV."""

    file: str
    line: int
    values: Mapping[str, object]

    def error(self, reason: SkipReason, field: str, value: object, allowed: str) -> TraceError:
        return TraceError(Fault(reason, self.file, self.line, field, shown(value), allowed))

    def get(self, field: str) -> object:
        if field not in self.values:
            raise TraceError(Fault(SkipReason.MISSING_FIELD, self.file, self.line, field, "missing", "a value"))
        return self.values[field]

    def tokens(self, field: str, minimum: int) -> int:
        return self.integer(field, minimum, MAX_TOKENS)

    def integer(self, field: str, minimum: int, maximum: int) -> int:
        value = self.get(field)
        number = _integer(value)
        if number is None or not minimum <= number <= maximum:
            raise self.error(SkipReason.BAD_VALUE, field, value, f"an integer from {minimum} to {maximum}")
        return number

    def seconds(self, field: str, units_per_second: int) -> float:
        value = self.get(field)
        number = _number(value)
        if number is None or not math.isfinite(number) or number > MAX_TIME_S * units_per_second:
            raise self.error(SkipReason.BAD_VALUE, field, value, "a finite number, zero or more")
        if number < 0:
            raise self.error(SkipReason.NEGATIVE_TIME, field, value, "a finite number, zero or more")
        return number / units_per_second

    def ids(self, field: str, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Block ids; their number must be one of `counts`."""
        value = self.get(field)
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= MAX_ID for item in value):
            raise self.error(SkipReason.BAD_VALUE, field, value, "a list of integers from 0 to 2^64 - 1")
        if len(value) not in counts:
            allowed = f"{' or '.join(str(count) for count in counts)} ids for this length"
            raise self.error(SkipReason.HASH_COUNT, field, f"a list of {len(value)} ids", allowed)
        return tuple(value)


def _integer(value: object) -> int | None:
    if type(value) is int:
        return value
    if isinstance(value, str) and len(value) <= 20 and value.strip().lstrip("+-").isdecimal():
        return int(value)
    return None


def _number(value: object) -> float | None:
    if type(value) is int or type(value) is float:
        return float(value) if abs(value) < 1e300 else None
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return None
