"""Who may come in: from the `Authorization` header to an `Account`.

Without a keys file everybody is the tenant `default` without limits, which is what a gateway on one's own machine wants. With
one, every path but the few public ones asks for a key. The file is read again when it changes, and on demand; a file that
cannot be used changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from os import stat_result
from pathlib import Path

from conductor.gateway.account import Account
from conductor.gateway.errors import ApiError
from conductor.gateway.keys import OPEN_TENANT, Keyring, KeysError, Tenant, load_keys

logger = logging.getLogger(__name__)

PUBLIC_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json"})
AUTHORIZATION = b"authorization"
BEARER = b"bearer "
MAX_KEY_BYTES = 512
HOW_TO = "allowed: 'Authorization: Bearer KEY' with a key of this gateway"


class Access:
    """Mutable: the keyring in force, and the accounts, which outlive it."""

    def __init__(self, file: Path | None = None) -> None:
        """Raises `KeysError`."""
        self._file = file
        self._accounts: dict[str, Account] = {}
        self._keyring: Keyring | None = None
        self._signature: tuple[int, ...] | None = None
        self._open = self._account(OPEN_TENANT)
        if file is not None:
            self.reload()

    @property
    def keyring(self) -> Keyring | None:
        """None when no key is asked for."""
        return self._keyring

    @property
    def accounts(self) -> list[Account]:
        """Of every tenant that may come in, in the order of their names."""
        names = [self._open.tenant.name] if self._keyring is None else sorted(self._keyring.tenants)
        return [self._accounts[name] for name in names]

    def account(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Account:
        """Whose request this is; raises `ApiError` 401 or 403. Public paths belong to the open tenant."""
        if self._keyring is None or path in PUBLIC_PATHS:
            return self._open
        tenant = self._keyring.tenant_of(bearer_key(headers))
        if tenant is None:
            raise unauthorized(f"the API key is not known; {HOW_TO}", "invalid_api_key")
        if tenant.disabled:
            raise ApiError(403, f"tenant {tenant.name!r} is disabled; ask who runs this gateway", "tenant_disabled")
        return self._accounts[tenant.name]

    def reload(self) -> None:
        """Read the file now; raises `KeysError`, and then the former keys stay in force."""
        if self._file is None:
            raise KeysError("no keys file is configured; allowed: gateway.keys_file, a YAML or JSON file")
        signature = _signature(self._file)
        keyring = load_keys(self._file)
        for tenant in keyring.tenants.values():
            self._account(tenant).change_limits(tenant)
        self._keyring, self._signature = keyring, signature

    def reload_if_changed(self) -> bool:
        """Read the file if it is not the one last read; True when its keys are now in force. Never raises."""
        if self._file is None or (signature := _signature(self._file)) == self._signature:
            return False
        try:
            self.reload()
        except KeysError as problem:
            self._signature = signature  # complain once for each content
            logger.error("the keys file was not taken, the former keys stay in force: %s", problem)
            return False
        logger.info("the keys file was read again: %d tenants", len(self.accounts))
        return True

    async def follow_file(self, period_s: float) -> None:
        """Look for a changed file for ever; ends at once without a file."""
        while self._file is not None:
            await asyncio.sleep(period_s)
            self.reload_if_changed()

    def _account(self, tenant: Tenant) -> Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = Account(tenant)
        return account


def bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key of a request; raises `ApiError` 401. Exactly one `Authorization` header counts."""
    given = [value for name, value in headers if name == AUTHORIZATION]
    if not given:
        raise unauthorized(f"the API key is missing; {HOW_TO}", "missing_api_key")
    scheme, key = given[0][: len(BEARER)].lower(), given[0][len(BEARER) :].strip()
    if len(given) > 1 or scheme != BEARER or not 0 < len(key) <= MAX_KEY_BYTES:
        raise unauthorized(f"the Authorization header is not understood; {HOW_TO}", "invalid_api_key")
    return key


def unauthorized(message: str, code: str) -> ApiError:
    return ApiError(401, message, code, headers={"www-authenticate": 'Bearer realm="conductor"'})


def _signature(file: Path) -> tuple[int, ...] | None:
    """Changes with the file; a replaced file has another inode."""
    try:
        found: stat_result = file.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)
