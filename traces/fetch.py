"""Fetch a trace from a public address: resumed where it broke off, checked, and put in place whole or not at all.

What has arrived lies beside the target as `NAME.part`, with the server's validator in `NAME.part.etag`. A resumed download
asks for the rest only if the file at the address is still the same one (If-Range); else it starts again. Proxies of the
environment are honoured.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 30.0
Progress = Callable[[int, int | None], None]


class FetchError(RuntimeError):
    """A download failed; the message says at what address and why. What has arrived is kept unless it is wrong."""


class AddressError(FetchError):
    """Nothing can be fetched from such an address."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A finished download."""

    path: Path
    size_bytes: int
    sha256: str
    resumed_from_bytes: int


def fetch(url: str, target: Path, *, sha256: str | None = None, progress: Progress | None = None) -> Fetched:
    """Download `url` to `target`. `progress` sees bytes so far and in all. Raises FetchError.

    With `sha256` the content must have that checksum; a download that has not is thrown away and `target` left as it was.
    """
    if httpx.URL(url).scheme not in ("http", "https"):
        raise AddressError(f"address is {url!r}; allowed: an http or https address")
    part = target.with_name(target.name + ".part")
    etag = target.with_name(target.name + ".part.etag")
    try:
        resumed_from_bytes = _download(url, part, etag, progress)
    except httpx.HTTPError as error:
        raise FetchError(f"{url}: {type(error).__name__}: {error}; what has arrived is kept, run it again to go on") from error
    found = _sha256(part)
    if sha256 is not None and found != sha256.lower():
        part.unlink()
        etag.unlink(missing_ok=True)
        raise FetchError(f"{url}: sha256 is {found}; allowed: {sha256.lower()}. The download was thrown away")
    size_bytes = part.stat().st_size
    os.replace(part, target)
    etag.unlink(missing_ok=True)
    return Fetched(target, size_bytes, found, resumed_from_bytes)


def _download(url: str, part: Path, etag: Path, progress: Progress | None) -> int:
    """Bring `part` to the whole content; returns the byte that it went on from."""
    have_bytes = part.stat().st_size if part.exists() and etag.exists() else 0
    headers = {"accept-encoding": "identity"}
    if have_bytes:
        headers |= {"range": f"bytes={have_bytes}-", "if-range": etag.read_text(encoding="utf-8")}
    with httpx.stream("GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT_S) as response:
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE and _is_whole(response, have_bytes):
            return have_bytes
        if response.status_code not in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
            raise FetchError(f"{url}: the server answers {response.status_code}; allowed: 200 or 206")
        start_bytes = have_bytes if response.status_code == httpx.codes.PARTIAL_CONTENT else 0
        _remember_validator(response, etag)
        _append(response, part, start_bytes, progress)
    return start_bytes


def _append(response: httpx.Response, part: Path, start_bytes: int, progress: Progress | None) -> None:
    length = response.headers.get("content-length")
    total_bytes = None if length is None else start_bytes + int(length)
    done_bytes = start_bytes
    with part.open("ab" if start_bytes else "wb") as file:
        for chunk in response.iter_bytes(CHUNK_BYTES):
            file.write(chunk)
            done_bytes += len(chunk)
            if progress is not None:
                progress(done_bytes, total_bytes)


def _remember_validator(response: httpx.Response, etag: Path) -> None:
    """Keep what tells this version of the content from another; without it, nothing can be resumed."""
    validator = response.headers.get("etag", "")
    if validator and not validator.startswith("W/"):
        etag.write_text(validator, encoding="utf-8")
    else:
        etag.unlink(missing_ok=True)


def _is_whole(response: httpx.Response, have_bytes: int) -> bool:
    """The server says that nothing is left behind what we have."""
    content_range: str | None = response.headers.get("content-range")
    return content_range == f"bytes */{have_bytes}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
