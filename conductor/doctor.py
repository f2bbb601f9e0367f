"""`conductor doctor`: what serving with a configuration needs of this machine, one finding a line, none of them guessed."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from conductor.config import Config
from conductor.gateway.server import BindError, bind
from conductor.serve import ServeError, check_memory, prepare_model
from models.errors import ModelError

SHARED_MEMORY = Path("/dev/shm")
PACKAGES = ("ray", "torch", "numpy", "fastapi", "tokenizers", "scikit-learn")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    ok: bool
    found: str


def examine(config: Config) -> list[Finding]:
    """Every check, in the order in which `serve` would meet them."""
    return [
        Finding("python", True, platform.python_version()),
        *_packages(),
        _attempt("port", lambda: _port(config)),
        _attempt("shared memory", lambda: _shared_memory(config)),
        _attempt("model and memory", lambda: _model_and_memory(config)),
    ]


def _attempt(check: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(check, True, look())
    except (BindError, ModelError, ServeError) as error:
        return Finding(check, False, str(error))


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding(name, True, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, False, "not installed")


def _port(config: Config) -> str:
    bind(config.gateway.host, config.gateway.port).close()
    return f"{config.gateway.host}:{config.gateway.port} is free"


def _shared_memory(config: Config) -> str:
    """Ray puts its object store there, and falls back to slow files when it does not fit."""
    if not SHARED_MEMORY.is_dir():
        return f"{SHARED_MEMORY} does not exist here"
    free_bytes, needed_bytes = shutil.disk_usage(SHARED_MEMORY).free, config.cluster.object_store_mib * 2**20
    if free_bytes < needed_bytes:
        wanted = f"cluster.object_store_mib asks for {needed_bytes / GIB:.1f} GiB"
        raise ServeError(f"{SHARED_MEMORY} has {free_bytes / GIB:.1f} GiB free; {wanted}")
    return f"{free_bytes / GIB:.1f} GiB free in {SHARED_MEMORY}"


def _model_and_memory(config: Config) -> str:
    prepared = prepare_model(config)
    check_memory(config, prepared)
    return f"{prepared.card.name} revision {prepared.card.revision[:12]} fits"
