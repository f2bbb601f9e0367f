"""The user's cache directory: folders that appear whole or not at all, and that tell when they are damaged.

A cached folder is built beside its place and renamed into it, under a file lock, so that several processes may ask for it at
once. Its manifest, written last, names the source's sha256 and each file's size and checksum (XXH3: it finds damage, it does
not defend against forgery; what comes from the network is checked by sha256 before it gets here). Torch-free.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from models.errors import ModelFileError

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 22


def cache_root(environment: Mapping[str, str] | None = None) -> Path:
    """$CONDUCTOR_CACHE, else $XDG_CACHE_HOME/kv-conductor, else ~/.cache/kv-conductor."""
    env = os.environ if environment is None else environment
    if env.get("CONDUCTOR_CACHE"):
        return Path(env["CONDUCTOR_CACHE"]).expanduser()
    base = env.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kv-conductor"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, between processes, on the file `path`, which is created if need be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise ModelFileError(f"the cache directory {path.parent} cannot be written: {error.strerror}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def scratch_folder(beside: Path) -> Iterator[Path]:
    """A temporary folder on the same file system as `beside`, gone afterwards. Turns a full disk into a `ModelFileError`.

    The caller holds the lock of `beside`: what a killed predecessor left is removed.
    """
    for leftover in beside.parent.glob(f".{beside.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{beside.name}-", dir=beside.parent))
    try:
        yield folder
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelFileError(f"disk full: no room under {beside.parent} ({error.strerror})") from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, value: object) -> None:
    """Write `value` so that a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        json.dump(value, file, indent=1, sort_keys=True)
    Path(name).replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `ModelFileError` when the file is missing, unreadable, or something else."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} is damaged: it holds a {type(value).__name__} instead of an object")
    return value


def ensure_folder(target: Path, source_sha256: str, build: Callable[[Path], None]) -> Path:
    """`target`, verified; built by `build(temporary folder)` when it is missing, damaged, or made of another source."""
    with locked(target.with_name(f".{target.name}.lock")):
        if damage(target, source_sha256) is None:
            return target
        with scratch_folder(target) as scratch:
            complete = scratch / "complete"
            complete.mkdir()
            build(complete)
            write_json(complete / MANIFEST, _manifest(complete, source_sha256))
            if target.exists():
                target.rename(scratch / "replaced")
            complete.rename(target)
    return target


def _manifest(folder: Path, source_sha256: str) -> dict[str, Any]:
    files = {
        path.name: {"bytes": path.stat().st_size, "xxh3_128": _checksum(path)}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    return {"source_sha256": source_sha256, "files": files}


def damage(folder: Path, source_sha256: str) -> str | None:
    """What is wrong with a cached folder, None when it is whole. Reads every byte of it."""
    try:
        manifest = read_json(folder / MANIFEST)
        if manifest["source_sha256"] != source_sha256:
            return f"{folder} was made from another source"
        for name, expected in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != expected["bytes"] or _checksum(path) != expected["xxh3_128"]:
                return f"{path} is damaged"
    except (ModelFileError, OSError, KeyError, TypeError, AttributeError) as error:
        return str(error) or type(error).__name__
    return None
