"""API keys and the tenants that they belong to, as a file says.

    tenants:
      research:
        keys: ["sha256:9f86d081..."]   # several while a key is being replaced
        tokens_per_s: 5000             # prompt and output tokens; absent: no limit
        burst_tokens: 60000            # absent: one minute of the rate
        max_in_flight: 32              # requests at once; absent: no limit
        weight: 2                      # share of a full gateway, against other tenants' weights
        sharing_group: lab             # shares cached prefixes with the other members of the group; absent: with nobody
        disabled: false                # true answers 403 to its keys

YAML or JSON. The file holds hashes alone. Keys carry 256 random bits, so one round of SHA-256 without salt cannot be searched;
what is compared in the end is compared in constant time. A key is never put into a message, a log line or a metric.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from conductor.yaml_file import YamlError, parse_yaml

DEFAULT_TENANT = "default"
KEY_PREFIX = "ck-"
HASH_PREFIX = "sha256:"
KEY_HASH_PATTERN = r"^sha256:[0-9a-f]{64}$"
NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"
INDEXED_BYTES = 8
BURST_S = 60.0

KeyHash = Annotated[str, StringConstraints(pattern=KEY_HASH_PATTERN)]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


class KeysError(ValueError):
    """The keys file cannot be used; the message names the field, its value and what is allowed."""


class _TenantEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    keys: Annotated[list[KeyHash], Field(min_length=1)]
    tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    burst_tokens: Annotated[float, Field(gt=0)] | None = None
    max_in_flight: Annotated[int, Field(ge=1)] | None = None
    weight: Annotated[float, Field(ge=0.01, le=1000)] = 1.0
    sharing_group: Name | None = None
    disabled: bool = False


class _KeysFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tenants: dict[Name, _TenantEntry]


@dataclass(frozen=True, slots=True)
class Tenant:
    """Limits of one tenant; None is no limit."""

    name: str
    tokens_per_s: float | None = None
    burst_tokens: float | None = None
    max_in_flight: int | None = None
    weight: float = 1.0
    sharing_group: str | None = None
    disabled: bool = False
    keys: int = 0


OPEN_TENANT = Tenant(DEFAULT_TENANT)


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def key_hash(key: str) -> str:
    """The form in which a key is kept."""
    return HASH_PREFIX + sha256(key.encode()).hexdigest()


def matches(key: bytes, kept: str) -> bool:
    """Whether `key` is the one kept as a hash; takes the same time wherever they differ."""
    return hmac.compare_digest(sha256(key).hexdigest(), kept.removeprefix(HASH_PREFIX))


class Keyring:
    """Immutable: tenants by name, and by key."""

    def __init__(self, tenants: Mapping[str, Tenant], hashes: Mapping[str, str]) -> None:
        """`hashes` maps the hash of each key to the name of its tenant."""
        self.tenants = dict(tenants)
        digests = {bytes.fromhex(kept.removeprefix(HASH_PREFIX)): name for kept, name in hashes.items()}
        self._by_prefix = {digest[:INDEXED_BYTES]: (digest, self.tenants[name]) for digest, name in digests.items()}

    def __len__(self) -> int:
        return len(self._by_prefix)

    def tenant_of(self, key: bytes) -> Tenant | None:
        """None for a key that is not in the ring. An attacker can time the look-up of a digest that nobody can choose."""
        digest = sha256(key).digest()
        kept, tenant = self._by_prefix.get(digest[:INDEXED_BYTES], (bytes(len(digest)), None))
        return tenant if hmac.compare_digest(kept, digest) else None


def load_keys(file: Path) -> Keyring:
    """Raises `KeysError`."""
    try:
        return parse_keys(file.read_text(encoding="utf-8"), str(file))
    except OSError as problem:
        raise KeysError(f"cannot read the keys file {file}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise KeysError(f"the keys file {file} is not UTF-8 text") from None


def parse_keys(text: str, where: str) -> Keyring:
    """The keys of a file's text; `where` names it in messages. Raises `KeysError`."""
    try:
        parsed = _KeysFile.model_validate(parse_yaml(text))
    except YamlError as problem:
        raise KeysError(f"{where} {problem}") from None
    except ValidationError as problem:
        raise KeysError(f"{where}: {_explain(problem)}") from None
    hashes: dict[str, str] = {}
    for name, entry in parsed.tenants.items():
        for kept in entry.keys:
            if hashes.setdefault(kept, name) != name:
                raise KeysError(
                    f"{where}: tenants {hashes[kept]!r} and {name!r} have a key in common; allowed: one tenant a key"
                )
    return Keyring({name: _tenant(name, entry) for name, entry in parsed.tenants.items()}, hashes)


def _tenant(name: str, entry: _TenantEntry) -> Tenant:
    burst = entry.burst_tokens
    if burst is None and entry.tokens_per_s is not None:
        burst = entry.tokens_per_s * BURST_S
    return Tenant(
        name,
        entry.tokens_per_s,
        burst,
        entry.max_in_flight,
        entry.weight,
        entry.sharing_group,
        entry.disabled,
        len(set(entry.keys)),
    )


def _explain(problem: ValidationError) -> str:
    """The first complaint. A value of `keys` is not quoted: it may be a key put there by mistake."""
    first: Any = problem.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"] if part != "[key]") or "the file"
    if "keys" in first["loc"]:
        return f"{field} is not a key's hash; allowed: 'sha256:' and 64 hexadecimal digits, as `conductor key new` prints them"
    return f"{field} is {first['input']!r}; allowed: {first['msg'].removeprefix('Input should be ')}"
