"""What one worker is made of, checked when it is built: a wrong value is named with its field and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conductor.core.cost_profile import CostProfile
from conductor.core.types import Role
from models.kv_layout import FORMATS
from workers.batching import DEFAULT_CHUNK_TOKENS
from workers.kv_store.settings import StoreSettings
from workers.kv_transfer.select import transport_names
from workers.kv_transfer.throttled import LinkLimit
from workers.processors import check_processors

WEIGHT_FORMATS = ("full", "int8", "int4")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker. Its KV memory is `num_blocks` blocks, or as many as fit into `kv_memory_bytes`; exactly one is given.

    `node`, `rack` and `zone` name where it runs (node None: the host's name). `profile` None: measured on first use.
    `transport` is one, several in order of preference, separated by commas, or `auto`.
    `transport_codec`: the number format in which KV moves (None: as it is cached).
    `speculative_tokens`: how many tokens ahead decode guesses by prompt lookup.
    `lease_s` bounds how long an offer or an unfinished hand-over may hold blocks.
    `cpus`: the processors of each of its actors, as `workers.processors` reads them; empty: any.
    `stages`: how many actors share the layers of a prefill worker; `stage_options` are what Ray is told of each but the first.
    """

    worker_id: str
    role: Role
    model: str
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    block_tokens: int = 64
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    max_batch: int = 16
    speculative_tokens: int = 0
    threads: int = 1
    cpus: tuple[str, ...] = ()
    device: str = "cpu"
    compute_dtype: str = "float32"
    kv_dtype: str = "float32"
    weights: str = "full"
    transport: str = "object_store"
    transport_codec: str | None = None
    link: LinkLimit = field(default_factory=LinkLimit)
    lease_s: float = 60.0
    report_interval_s: float = 0.5
    max_unread_outputs: int = 100_000
    profile: CostProfile | None = None
    profile_budget_s: float = 20.0
    node: str | None = None
    rack: str = ""
    zone: str = ""
    store: StoreSettings = field(default_factory=StoreSettings)
    stages: int = 1
    stage_options: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name in ("worker_id", "model", "device"):
            if not getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must not be empty")
        for name in ("block_tokens", "chunk_tokens", "max_batch", "threads", "max_unread_outputs", "stages"):
            _at_least(name, getattr(self, name), 1)
        _at_least("speculative_tokens", self.speculative_tokens, 0)
        _stages_of("stages", self.stages, self.role)
        _one_for_each("cpus", self.cpus, self.stages)
        if (self.num_blocks is None) == (self.kv_memory_bytes is None):
            found = f"num_blocks is {self.num_blocks!r} and kv_memory_bytes is {self.kv_memory_bytes!r}"
            raise ValueError(f"{found}; exactly one of them must be given")
        for name in ("num_blocks", "kv_memory_bytes"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("lease_s", "report_interval_s", "profile_budget_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be above 0")
        _one_of("compute_dtype", self.compute_dtype, DTYPES)
        _one_of("kv_dtype", self.kv_dtype, DTYPES)
        _one_of("weights", self.weights, WEIGHT_FORMATS)
        transport_names(self.transport)
        if self.transport_codec is not None:
            _one_of("transport_codec", self.transport_codec, tuple(FORMATS))

    def blocks(self, block_bytes: int) -> int:
        """How many blocks of `block_bytes` the worker has. Raises `ValueError` when not one fits."""
        if self.num_blocks is not None:
            return self.num_blocks
        assert self.kv_memory_bytes is not None
        if self.kv_memory_bytes < block_bytes:
            raise ValueError(f"kv_memory_bytes is {self.kv_memory_bytes}; one block needs {block_bytes}")
        return self.kv_memory_bytes // block_bytes


def _at_least(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")


def _stages_of(name: str, value: int, role: Role) -> None:
    if value > 1 and role is not Role.PREFILL:
        raise ValueError(f"{name} is {value!r} for a {role.value} worker; it must be 1")


def _one_for_each(name: str, processors: tuple[str, ...], actors: int) -> None:
    for each in processors:
        check_processors(each)
    if len(processors) not in (0, actors):
        raise ValueError(f"{name} is {list(processors)} for {actors} actors; allowed: none, or one for each")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
