"""Ids of requests: unique, not secret (whose request it is decides who may see it), so none costs a call of the system."""

from __future__ import annotations

import random

_source = random.Random()  # seeded by the system


def unique_hex() -> str:
    """128 random bits as 32 hexadecimal digits."""
    return f"{_source.getrandbits(128):032x}"
