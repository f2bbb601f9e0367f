"""What a request says of itself in headers: objectives, priority, traffic class, session, and the client's own request id.

    x-conductor-ttft-slo-ms, x-conductor-tbt-slo-ms   a number of milliseconds
    x-conductor-priority                              high, normal or low
    x-conductor-class, x-conductor-session            a word
    x-request-id                                      echoed on the answer

A header that is not understood is an error; an unknown `x-conductor-*` header too, since a misspelt objective would
otherwise silently not hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from conductor.core.types import SLO, Priority
from conductor.gateway.errors import ApiError, invalid
from conductor.gateway.settings import GatewaySettings

PREFIX = b"x-conductor-"
MAX_OBJECTIVE_MS = 86_400_000.0
CLASS_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
SESSION_PATTERN = re.compile(r"[!-~]{1,256}")
KNOWN = ("ttft-slo-ms", "tbt-slo-ms", "priority", "class", "session")


@dataclass(frozen=True, slots=True)
class Hints:
    slo: SLO
    priority: Priority = Priority.NORMAL
    traffic_class: str = "chat"
    session: str | None = None


def read_hints(headers: Iterable[tuple[bytes, bytes]], settings: GatewaySettings) -> Hints:
    """Parse ASGI headers (names in lower case); raises `ApiError` 400."""
    given = {
        name[len(PREFIX) :].decode("latin-1"): value.decode("latin-1") for name, value in headers if name.startswith(PREFIX)
    }
    if not given:
        return Hints(SLO(settings.default_ttft_slo_s, settings.default_tbt_slo_s))
    for name, value in given.items():
        if name not in KNOWN:
            raise invalid(f"x-conductor-{name}", value, ", ".join(f"x-conductor-{known}" for known in KNOWN), "unknown_header")
    return Hints(
        slo=SLO(
            _objective_s("ttft-slo-ms", given, settings.default_ttft_slo_s),
            _objective_s("tbt-slo-ms", given, settings.default_tbt_slo_s),
        ),
        priority=_priority(given),
        traffic_class=_word("class", given, CLASS_PATTERN, "1 to 64 letters, digits, '_', '.' or '-'") or "chat",
        session=_word("session", given, SESSION_PATTERN, "1 to 256 printable ASCII characters without spaces"),
    )


def _objective_s(name: str, given: dict[str, str], default_s: float | None) -> float | None:
    if name not in given:
        return default_s
    try:
        value_ms = float(given[name])
    except ValueError:
        raise _bad_objective(name, given[name]) from None
    if not math.isfinite(value_ms) or not 0 < value_ms <= MAX_OBJECTIVE_MS:
        raise _bad_objective(name, given[name])
    return value_ms / 1000


def _bad_objective(name: str, value: str) -> ApiError:
    return invalid(f"x-conductor-{name}", value, f"milliseconds above 0 and up to {MAX_OBJECTIVE_MS:.0f}")


def _priority(given: dict[str, str]) -> Priority:
    value = given.get("priority", Priority.NORMAL.name)
    try:
        return Priority[value.upper()]
    except KeyError:
        raise invalid("x-conductor-priority", value, ", ".join(level.name.lower() for level in Priority)) from None


def _word(name: str, given: dict[str, str], pattern: re.Pattern[str], allowed: str) -> str | None:
    value = given.get(name)
    if value is not None and not pattern.fullmatch(value):
        raise invalid(f"x-conductor-{name}", value, allowed)
    return value
