"""`conductor doctor`: what serving with a configuration needs of this machine, one finding a line, none of them guessed."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from conductor.cluster import plan_workers, usable_transports
from conductor.config import Config, ConfigError
from conductor.connection import ClusterError, check_address
from conductor.gateway.server import BindError, bind
from conductor.serve import ServeError, check_flight_log, check_gateway, check_memory, prepare_model
from models.errors import ModelError

SHARED_MEMORY = Path("/dev/shm")
PACKAGES = ("ray", "torch", "numpy", "fastapi", "tokenizers", "scikit-learn")
COARSEST_CLOCK_S = 1e-3
EARLIEST_TIME_S = 1_735_689_600.0  # 2025-01-01
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
        _attempt("clock", _clock),
        _attempt("port", lambda: _port(config.gateway.host, config.gateway.port)),
        _attempt("admin port", lambda: _admin_port(config)),
        _attempt("gateway files", lambda: _gateway_files(config)),
        _attempt("flight log", lambda: check_flight_log(config)),
        _attempt("Ray", lambda: _ray(config)),
        _attempt("workers", lambda: _workers(config)),
        _attempt("transports", lambda: usable_transports(config)),
        _attempt("shared memory", lambda: _shared_memory(config)),
        _attempt("model and memory", lambda: _model_and_memory(config)),
    ]


def _attempt(check: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(check, True, look())
    except (BindError, ClusterError, ConfigError, ModelError, ServeError) as error:
        return Finding(check, False, str(error))


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        try:
            yield Finding(name, True, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, False, "not installed")


def _clock() -> str:
    """Durations come from the monotonic clock; epochs of workers, and what people read, from the wall clock."""
    resolution_s = time.get_clock_info("monotonic").resolution
    if resolution_s > COARSEST_CLOCK_S:
        raise ServeError(f"the monotonic clock has steps of {resolution_s:g} s; allowed: up to {COARSEST_CLOCK_S:g} s")
    if time.time() < EARLIEST_TIME_S:
        raise ServeError(f"the wall clock says {time.strftime('%Y-%m-%d')}, which is long past; set it")
    return f"{time.strftime('%Y-%m-%d %H:%M:%S%z')}, monotonic in steps of {resolution_s:g} s"


def _port(host: str, port: int) -> str:
    bind(host, port).close()
    return f"{host}:{port} is free"


def _admin_port(config: Config) -> str:
    gateway = config.gateway
    return "closed" if gateway.admin_port is None else _port(gateway.admin_host, gateway.admin_port)


def _gateway_files(config: Config) -> str:
    check_gateway(config.gateway)
    files = [config.gateway.keys_file, config.gateway.tls_cert_file, config.gateway.tls_key_file]
    return ", ".join(str(file) for file in files if file is not None) or "none are named"


def _ray(config: Config) -> str:
    address = config.cluster.address
    return "is started on this machine" if address is None else check_address(address)


def _workers(config: Config) -> str:
    return f"{len(plan_workers(config))} workers can be planned"


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
