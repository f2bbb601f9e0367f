"""`conductor serve`: gateway, engine client and cluster in one process, from checks before anything starts to nothing left.

Order: the port is bound first, because a taken port is the commonest mistake; the model is found and verified; the memory that
the workers will want is held against what the machine has; then Ray, the Conductor and the workers start, and the gateway
answers last. SIGTERM or SIGINT during the start gives up; while serving, the first one drains and a second one ends at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryFile

from conductor.cluster import Cluster, Progress, plan_workers
from conductor.config import Config, ConfigError
from conductor.connection import ClusterError, NoAnswer
from conductor.core.hashing import KVNamespace, hash_blocks
from conductor.core.types import BlockHash
from conductor.engine_client import HashPrompt
from conductor.flight_log import flight_log_runs
from conductor.gateway import GatewaySettings, ServedModel, create_app
from conductor.gateway.keys import KeysError, load_keys
from conductor.gateway.logs import configure_logging
from conductor.gateway.server import BindError, Server, bind, bind_admin, make_server, spare_the_collector
from conductor.gateway.tls import TlsError, certificates
from conductor.gateway.tracing import Tracing, TracingError, check_environment, tracing_from
from conductor.ray_engine_client import RayEngineClient
from models.errors import ModelError
from models.folder import ModelCard, check_weights, find_model, model_card, namespace_in_formats
from models.stages import Share
from models.tokenizer import load_tokenizer_folder

__all__ = ["BindError", "ClusterError", "ConfigError", "ModelError", "NoAnswer", "ServeError", "serve"]

BASE_PROCESS_BYTES = 350 * 2**20  # interpreter, Ray and torch of one worker
RAY_BYTES = 700 * 2**20  # Ray's own processes, the Conductor and the gateway
MEMINFO = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
SIGNAL_S = 0.01  # the event loop's own way from a signal to its handler takes a few rounds
GIB = 2**30


class ServeError(RuntimeError):
    """Serving cannot begin; the message is one line for people."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known of the model before anything starts."""

    card: ModelCard
    served: ServedModel
    hash_prompt: HashPrompt
    weights_bytes: int


def prepare_model(config: Config) -> Prepared:
    """Find and verify the model, pulling the default one if need be. Raises `ModelError`."""
    folder = find_model(config.model.name)
    check_weights(folder)
    for stages in config.workers.stages:
        Share(of=stages).check(folder.config, "workers.prefill_stages")
    tokenizer = load_tokenizer_folder(folder.path)
    card = model_card(folder, tokenizer, config.model.kv_dtype, config.model.weights)
    formats = {"moved": config.workers.transport_codec, "stored": config.store.codec}
    replayed = config.store.replay_windows
    namespace = namespace_in_formats(card.namespace, config.model.kv_dtype, replayed=replayed, **formats)
    hash_prompt = prompt_hasher(namespace, config.scheduler.block_tokens)
    created_s = int((folder.path / "config.json").stat().st_mtime)  # of the folder, so that all its gateways say the same
    served = ServedModel((card.name,), card.max_context, tokenizer, hash_prompt, created_s)
    weights_bytes = sum(path.stat().st_size for path in folder.path.glob("*.safetensors"))
    return Prepared(card, served, hash_prompt, weights_bytes)


def prompt_hasher(model: tuple[str, ...], block_tokens: int) -> HashPrompt:
    """How prompts of a model become block hashes; cache domains share no prefixes."""

    @lru_cache(maxsize=4096)
    def seed(domain: str) -> BlockHash:
        return KVNamespace(model, block_tokens, salt=domain).seed

    def hash_prompt(tokens: bytes, domain: str) -> tuple[BlockHash, ...]:
        return hash_blocks(seed(domain), tokens, block_tokens)

    return hash_prompt


def memory_needed_bytes(config: Config, prepared: Prepared) -> int:
    """What the deployment may come to hold, weights mapped once."""
    workers = config.workers
    blocks = workers.prefill * workers.prefill_blocks + workers.decode * workers.decode_blocks
    kv_bytes = blocks * config.scheduler.block_tokens * prepared.card.kv_bytes_per_token
    processes_bytes = workers.actors * BASE_PROCESS_BYTES + RAY_BYTES
    return kv_bytes + prepared.weights_bytes + processes_bytes + config.cluster.object_store_mib * 2**20


def available_bytes(meminfo: Path = MEMINFO, cgroup_limit: Path = CGROUP_LIMIT) -> int | None:
    """Memory that this machine, or this control group, can still give; None where that cannot be told."""
    if not meminfo.is_file():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = cgroup_limit.read_text().strip() if cgroup_limit.is_file() else "max"
    return available if limit == "max" else min(available, int(limit))


def check_memory(config: Config, prepared: Prepared) -> None:
    """Raises `ServeError` when a local deployment will not fit."""
    available = available_bytes() if config.cluster.address is None else None
    needed = memory_needed_bytes(config, prepared)
    if available is not None and needed > available:
        raise ServeError(
            f"not enough memory: the workers need about {needed / GIB:.1f} GiB and {available / GIB:.1f} GiB are available; "
            "lower workers.prefill_blocks, workers.decode_blocks or the number of workers"
        )


@dataclass(frozen=True, slots=True)
class Listeners:
    """The sockets that people reach the deployment on; `admin` None is closed."""

    gateway: socket.socket
    admin: socket.socket | None


@contextmanager
def open_listeners(settings: GatewaySettings) -> Iterator[Listeners]:
    """Raises `BindError`."""
    with ExitStack() as stack:
        gateway = stack.enter_context(bind(settings.host, settings.port))
        admin = bind_admin(settings)
        if admin is not None:
            stack.enter_context(admin)
        yield Listeners(gateway, admin)


def check_gateway(settings: GatewaySettings) -> None:
    """Raises `ConfigError` when a file that the gateway is told to use cannot be used."""
    try:
        if settings.keys_file is not None:
            load_keys(settings.keys_file)
        certificates(settings)
        check_environment(os.environ)
    except (KeysError, TlsError, TracingError) as error:
        raise ConfigError(str(error)) from None


def check_flight_log(config: Config) -> str:
    """Where runs are recorded. Raises `ConfigError` where the Conductor of this machine could not do so."""
    runs = flight_log_runs(config.flight_log)
    if runs is None:
        return "not recorded"
    if config.cluster.address is not None:
        return f"in {runs.directory} of the Conductor's node"
    try:
        runs.directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=runs.directory):
            pass
    except OSError as error:
        allowed = "allowed: a directory that can be written to"
        raise ConfigError(f"flight_log.directory is {str(runs.directory)!r}; {allowed} ({error.strerror})") from None
    return f"in {runs.directory}"


def serve(config: Config, progress: Progress) -> None:
    """Serve until a signal. Raises `BindError`, `ConfigError`, `ModelError`, `ServeError`, `ClusterError`;
    `asyncio.CancelledError` when a signal gave up the start."""
    configure_logging(config.gateway.log_format, config.gateway.log_level)
    check_gateway(config.gateway)
    check_flight_log(config)
    with open_listeners(config.gateway) as listeners:
        progress(f"finding the model {config.model.name}")
        prepared = prepare_model(config)
        check_memory(config, prepared)
        with asyncio.Runner(loop_factory=_uvloop) as runner:
            runner.run(_serve(config, prepared, listeners, progress))


def _uvloop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


class _Signals:
    """First signal: drain, or give up a start that is under way. Second signal: end at once."""

    def __init__(self, progress: Progress) -> None:
        self.server: Server | None = None
        self._progress = progress
        self._task = asyncio.current_task()
        self.install()

    def install(self) -> None:
        """Take the signals; again after anything else has taken them, as Ray does."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._received, number)

    def _received(self, number: int) -> None:
        if self.server is None:
            if self._task is not None:
                self._task.cancel()
        else:
            count = self.server.service.in_flight
            if count:
                self._progress(f"requests in flight that are finished first: {count}; another signal ends at once")
            self.server.handle_exit(number, None)


async def _serve(config: Config, prepared: Prepared, listeners: Listeners, progress: Progress) -> None:
    signals = _Signals(progress)
    async with AsyncExitStack() as stack:
        plans = plan_workers(config)
        cluster = Cluster(config, progress)
        stack.push_async_callback(cluster.stop)
        cluster.connect()
        signals.install()
        await asyncio.sleep(SIGNAL_S)  # gives up here, and not with workers to end, when a signal came while Ray started
        await cluster.start(plans)
        client = RayEngineClient(cluster.conductor, prepared.hash_prompt)
        stack.push_async_callback(client.close)
        await client.start()
        await _check_model(client, prepared.card.name)
        tracing = Tracing(tracing_from(os.environ))
        stack.callback(tracing.close)
        app = create_app(client, prepared.served, config.gateway, tracing)
        signals.server = make_server(app, admin=listeners.admin, own_signals=False)
        spare_the_collector()
        host, port = listeners.gateway.getsockname()[:2]
        progress(ready_lines(host, port, prepared.served.name, config.gateway))
        await signals.server.serve(sockets=[listeners.gateway])
        progress("stopping the workers")


async def _check_model(client: RayEngineClient, model: str) -> None:
    """A gateway that attaches must ask for what is served there. Raises `ConfigError`."""
    status = await client.status()
    served = {str(worker["model"]) for worker in status.workers.values()}
    if served and model not in served:
        raise ConfigError(f"model.name is {model!r}; the workers of this cluster serve {', '.join(sorted(served))}")


def ready_lines(host: str, port: int, model: str, settings: GatewaySettings) -> str:
    """Where the gateway answers, whom it lets in, and a request to try."""
    url = f"{'http' if settings.tls_cert_file is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
    body = '{"model": "' + model + '", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
    lines = [f"ready: {url}"]
    if settings.keys_file is None and not ip_address(host.partition("%")[0]).is_loopback:
        lines.append("  whoever reaches this address may use it: gateway.keys_file names no keys")
    lines.append(f"  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")
    return "\n".join(lines)
