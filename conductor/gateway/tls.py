"""TLS by certificate files: one context for every socket of a gateway, read again when the files change.

A context that is in use takes new certificates for the connections that come after, so certificates are replaced without a
restart. TLS 1.2 is the least that is spoken.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from conductor.gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)


class TlsError(ValueError):
    """The certificate files cannot be used; the message names them and why."""


class Certificates:
    """Mutable: the context holds the certificate last read."""

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        """Raises `TlsError`."""
        self._files = (cert_file, key_file)
        self._seen = self._stamps()
        self.context = _load(*self._files)

    def reload_if_changed(self) -> bool:
        """True when another certificate is now in force; one that cannot be used leaves the former. Never raises."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            _load(*self._files)  # a context that refuses a pair may have taken half of it
            self.context.load_cert_chain(*self._files)
        except (TlsError, OSError) as problem:
            logger.error("the certificate was not taken, the former one stays in force: %s", problem)
            return False
        logger.info("the certificate was read again")
        return True

    async def follow_files(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            self.reload_if_changed()

    def _stamps(self) -> tuple[float | None, ...]:
        return tuple(file.stat().st_mtime if file.is_file() else None for file in self._files)


def certificates(settings: GatewaySettings) -> Certificates | None:
    """None for a gateway without TLS; raises `TlsError`."""
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return None
    return Certificates(settings.tls_cert_file, settings.tls_key_file)


def _load(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for file in (cert_file, key_file):
        if not file.is_file():
            raise TlsError(f"there is no TLS file {file}; allowed: a PEM file")
    try:
        context.load_cert_chain(cert_file, key_file)
    except (ssl.SSLError, OSError) as problem:
        reason = problem.reason if isinstance(problem, ssl.SSLError) else problem.strerror
        raise TlsError(f"certificate {cert_file} and key {key_file} cannot be used: {reason}") from None
    return context
