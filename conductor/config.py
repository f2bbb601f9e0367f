"""One configuration for everything: a YAML file, overridden by the environment, overridden by flags.

`load` merges the three layers and remembers for every value which of them it came from, so that `conductor config show` can
say so. An unknown key is an error that names the nearest valid one; a value out of range is an error that names the field,
the value, where it came from and what is allowed. Environment variables are `CONDUCTOR__SECTION__KEY`, and their values are
read as YAML scalars (`8`, `true`, `null`, `[a, b]`). The configuration is a frozen value: nobody reads the environment after
it is loaded.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from conductor.core.config import SchedulerConfig
from conductor.core.types import SLO
from conductor.gateway.settings import GatewaySettings
from conductor.policies_loader import PolicyError, load_policy
from conductor.yaml_file import YamlError, parse_yaml

ENVIRONMENT_PREFIX = "CONDUCTOR__"
ALMOST_PREFIX = "CONDUCTOR_"  # with a section's "__" behind it, the mistake that would be ignored in silence
RAY_ADDRESS = "RAY_ADDRESS"
DEFAULT_TTFT_SLO_S = 30.0  # the objective of the Mooncake paper's experiments (FAST'25, section 5.1)

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
ResourceDemand = Annotated[str, StringConstraints(pattern=r"^[^=\s]+=\d+(\.\d+)?$")]
LabelDemand = Annotated[str, StringConstraints(pattern=r"^[^=\s]+=[^=\s]+$")]


class ConfigError(ValueError):
    """The configuration cannot be used; the message says which value, where it came from and what is allowed."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClusterSection(Section):
    address: str | None = Field(default=None, description="Ray cluster to join; null starts one on this machine")
    namespace: str = Field(default="conductor", min_length=1, description="Ray namespace of the named actors")
    num_cpus: PositiveInt | None = Field(
        default=None, description="CPUs that a local Ray may use; null takes one for each actor"
    )
    object_store_mib: int = Field(default=512, ge=80, description="shared memory of a local Ray's object store")
    dashboard: bool = Field(default=False, description="start the Ray dashboard with a local Ray")
    auth_mode: Literal["disabled", "token"] = Field(
        default="token", description="RAY_AUTH_MODE of everything that is started here"
    )
    attach: bool = Field(
        default=False, description="add this gateway and these workers to the Conductor that runs in the namespace"
    )
    conductor_resources: tuple[ResourceDemand, ...] = Field(
        default=(), description="custom resources, as name=amount, of the Conductor's node"
    )
    conductor_labels: tuple[LabelDemand, ...] = Field(default=(), description="labels, as label=value, of the Conductor's node")
    leave_timeout_s: float = Field(default=30.0, ge=0, description="how long attached workers may finish before they leave")
    detached: bool = Field(default=False, description="leave Conductor and workers running when this process ends")
    start_timeout_s: PositiveFloat = Field(default=180.0, description="how long workers may take to load the model")
    restart_workers: bool = Field(default=True, description="start a lost worker again")
    restart_delay_s: float = Field(
        default=0.5, ge=0, description="pause before a lost worker is started again; doubles up to 30 s"
    )

    @model_validator(mode="after")
    def _attaches_somewhere(self) -> Self:
        if self.attach and self.address is None:
            raise ValueError("attach is set and address is not; allowed: the address of the Ray cluster to attach to")
        return self


class ModelSection(Section):
    name: str = Field(default="smollm2-135m", min_length=1, description="built-in model, or a local Hugging Face folder")
    compute_dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="type of weights and activations")
    kv_dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="type in which KV is stored")
    weights: Literal["full", "int8", "int4"] = Field(
        default="full", description="weights as they are, or in fewer bits for float32 on a CPU; int4 is for files in Q4_1"
    )


def _several(value: Any) -> Any:
    """A number, or several that commas separate, as a list."""
    if isinstance(value, str):
        return value.split(",")
    return (value,) if isinstance(value, int) else value


def _named(value: Any) -> Any:
    """One name, or several, as a list of strings; a number is a name."""
    values = value if isinstance(value, list | tuple) else [value]
    return [str(each) if isinstance(each, int) else each for each in values]


class WorkersSection(Section):
    prefill: int = Field(default=2, ge=0, le=1024, description="prefill workers")
    decode: int = Field(default=1, ge=0, le=1024, description="decode workers")
    prefill_stages: Annotated[tuple[PositiveInt, ...], BeforeValidator(_several)] = Field(
        default=(1,),
        description="actors that share a prefill worker's layers as a pipeline: one number for all workers, or a list",
    )
    id_prefix: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9_.-]{0,64}$",
        description="begins the worker ids; another one in every process that attaches",
    )
    layout: Literal["each", "pack", "spread", "strict_pack", "strict_spread"] = Field(
        default="each", description="over nodes: each worker by itself as evenly as it goes, or one placement group"
    )
    prefill_resources: tuple[ResourceDemand, ...] = Field(default=(), description="custom resources, as name=amount")
    prefill_labels: tuple[LabelDemand, ...] = Field(default=(), description="labels of the node, as label=value")
    decode_resources: tuple[ResourceDemand, ...] = Field(default=(), description="custom resources, as name=amount")
    decode_labels: tuple[LabelDemand, ...] = Field(default=(), description="labels of the node, as label=value")
    device: str = Field(default="cpu", min_length=1, description="torch device")
    threads: PositiveInt = Field(default=1, description="torch threads of one worker")
    cpus: Annotated[tuple[str, ...], BeforeValidator(_named)] = Field(
        default=(),
        description="processors, as 0-3,8, or memory nodes, as numa:1, that actors are bound to, in turn; empty: to none",
    )
    prefill_blocks: int = Field(default=384, ge=8, description="KV blocks of one prefill worker")
    decode_blocks: int = Field(default=384, ge=8, description="KV blocks of one decode worker")
    chunk_tokens: PositiveInt = Field(default=512, description="longest run of prompt tokens computed in one step")
    transport: str = Field(
        default="object_store,cma", description="how KV moves between workers: a name, several in order, or auto"
    )
    profile_budget_s: PositiveFloat = Field(default=20.0, description="time to measure a model on a machine, on first use")
    transport_codec: Literal["fp32", "bf16", "fp16", "fp8", "int8", "fp4", "mxfp4"] | None = Field(
        default=None, description="number format in which KV moves between workers; null: as it is cached"
    )
    max_batch: PositiveInt = Field(default=16, description="sequences that a decode worker runs together")
    speculative_tokens: int = Field(default=0, ge=0, le=16, description="tokens guessed ahead by prompt lookup; 0: none")
    link_gbps: float | None = Field(
        default=None, gt=0, description="slow every worker's link down to this; null leaves it alone"
    )
    link_latency_ms: float = Field(default=0.0, ge=0, description="delay added to every transfer")

    @property
    def stages(self) -> tuple[int, ...]:
        """Of each prefill worker."""
        return self.prefill_stages * self.prefill if len(self.prefill_stages) == 1 else self.prefill_stages

    @property
    def actors(self) -> int:
        return sum(self.stages) + self.decode

    def cpus_of(self, actors: range) -> tuple[str, ...]:
        """What each of these actors is bound to, counted over all prefill workers and then all decode workers."""
        return tuple(self.cpus[number % len(self.cpus)] for number in actors) if self.cpus else ()

    @model_validator(mode="after")
    def _has_stages_for_each(self) -> Self:
        if len(self.stages) != self.prefill:
            found = f"prefill_stages is {list(self.prefill_stages)} and prefill is {self.prefill}"
            raise ValueError(f"{found}; allowed: one number for all prefill workers, or a list with one for each")
        return self


class StoreSection(Section):
    host_mib: int = Field(default=1024, ge=0, description="memory of a host for KV that all its workers share; 0: none")
    disk_directory: Path | None = Field(default=None, description="directory on a local disk for KV; null: none")
    disk_mib: PositiveInt = Field(default=16384, description="what one worker keeps in disk_directory")
    shared_paths: tuple[str, ...] = Field(
        default=(), description="directories or URLs that every node sees, for KV; all clusters that name them share it"
    )
    shared_mib: PositiveInt = Field(default=65536, description="what all clusters together keep in shared_paths")
    high_watermark: float = Field(default=0.95, gt=0, le=1, description="share of a tier's capacity where reclaim begins")
    low_watermark: float = Field(default=0.85, gt=0, le=1, description="share of a tier's capacity where reclaim ends")
    agent_retention_days: float = Field(default=3.0, ge=0, description="target of x-conductor-class: agent")
    chat_retention_days: float = Field(default=7.0, ge=0, description="target of x-conductor-class: chat")
    other_retention_days: float = Field(default=7.0, ge=0, description="target of every other class")
    codec: Literal["fp32", "bf16", "fp16", "fp8", "int8", "fp4", "mxfp4"] | None = Field(
        default=None, description="number format of KV on disk and in shared_paths; null: as it is cached"
    )
    replay_windows: int = Field(
        default=0,
        ge=0,
        description="windows replayed after a restore from shared_paths, which then hold no sliding-window state; 0: they do",
    )
    queue_blocks: PositiveInt = Field(default=4096, description="blocks that may wait to be written to one tier")
    look_interval_s: PositiveFloat = Field(
        default=60.0, description="how often a worker looks whether others have changed what a tier holds"
    )
    throttle_mib_per_s: PositiveFloat | None = Field(
        default=None, description="slows disk and shared tier down, for tests and demonstrations"
    )


class FlightLogSection(Section):
    enabled: bool = Field(default=True, description="record every event and command")
    directory: Path | None = Field(default=None, description="where runs are recorded; null takes the user's state directory")
    segment_mib: PositiveInt = Field(default=64, description="size at which a run goes on in its next file")
    max_segments: int = Field(default=16, ge=2, description="files of one run; the oldest is deleted beyond that")
    keep_runs: PositiveInt = Field(default=10, description="runs kept in the directory; the oldest is deleted beyond that")


class Config(Section):
    """Everything that can be configured, by section. Tokens of a KV block are `scheduler.block_tokens`, for workers too."""

    cluster: ClusterSection = ClusterSection()
    model: ModelSection = ModelSection()
    workers: WorkersSection = WorkersSection()
    store: StoreSection = StoreSection()
    scheduler: SchedulerConfig = SchedulerConfig(slo=SLO(ttft_s=DEFAULT_TTFT_SLO_S))
    gateway: GatewaySettings = GatewaySettings()
    flight_log: FlightLogSection = FlightLogSection()


@dataclass(frozen=True, slots=True)
class Setting:
    """One value in force: its dotted key, and where it came from."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    config: Config
    sources: Mapping[str, str]
    """Dotted key to source, for every value that is not a default."""

    def settings(self) -> Iterator[Setting]:
        """Every value in force, in the order of the sections."""
        for key, value in _leaves(self.config.model_dump(mode="json")):
            yield Setting(key, value, self.sources.get(key, "default"))


def load(
    file: Path | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> LoadedConfig:
    """Merge the layers. `flags` maps dotted keys to values; a flag that is None was not given. Raises `ConfigError`."""
    layers: list[tuple[str, Any, str]] = []
    if file is not None:
        layers += [(key, value, f"file {file}") for key, value in _leaves(_read_yaml(file))]
    if (environment or {}).get(RAY_ADDRESS):  # Ray's own word for the cluster to join; every Ray job has it
        layers.append(("cluster.address", (environment or {})[RAY_ADDRESS], f"environment {RAY_ADDRESS}"))
    for name, text in sorted((environment or {}).items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            layers.append((key, _parse_scalar(name, text), f"environment {name}"))
        elif name.startswith(ALMOST_PREFIX) and "__" in name:
            meant = ENVIRONMENT_PREFIX + name.removeprefix(ALMOST_PREFIX)
            raise ConfigError(f"environment {name} is no setting; did you mean {meant}?")
    layers += [(key, value, "flag") for key, value in (flags or {}).items() if value is not None]
    return _merge(layers)


def _merge(layers: list[tuple[str, Any, str]]) -> LoadedConfig:
    valid_keys = all_keys()
    tree: dict[str, Any] = Config().model_dump(mode="json")
    sources: dict[str, str] = {}
    for key, value, source in layers:
        if key not in valid_keys:
            raise ConfigError(_unknown_key(key, value, source, valid_keys))
        _set(tree, key.split("."), value)
        sources[key] = source
    try:
        config = Config.model_validate(tree)
        load_policy(config.scheduler.policy)
    except ValidationError as error:
        raise ConfigError(_explain(error, sources)) from None
    except PolicyError as error:
        raise ConfigError(f"scheduler.{error} (from {sources.get('scheduler.policy', 'default')})") from error
    return LoadedConfig(config, sources)


def _set(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree[name]
    tree[path[-1]] = value


def all_keys() -> list[str]:
    """Every valid dotted key."""
    return [key for key, _ in _leaves(Config().model_dump(mode="json"))]


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        yield prefix, tree
        return
    for name, value in tree.items():
        yield from _leaves(value, f"{prefix}.{name}" if prefix else str(name))


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the configuration file {file} is not UTF-8 text") from None
    except YamlError as error:
        raise ConfigError(f"the configuration file {file} {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{file} holds {type(content).__name__}; expected a mapping with the sections {list(Config.model_fields)}"
        )
    return content


def _parse_scalar(name: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except YamlError:
        raise ConfigError(f"environment {name} = {text!r} is not a valid YAML value") from None


def _unknown_key(key: str, value: Any, source: str, valid_keys: list[str]) -> str:
    below = [valid.removeprefix(f"{key}.") for valid in valid_keys if valid.startswith(f"{key}.")]
    if below:
        return f"{key} = {value!r} ({source}) is not allowed; expected a mapping with the keys {', '.join(below)}"
    nearest = difflib.get_close_matches(key, valid_keys, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else f"allowed sections: {', '.join(Config.model_fields)}"
    return f"unknown configuration key {key} ({source}); {hint}"


def _with_parents(key: str) -> Iterator[str]:
    while key:
        yield key
        key = key.rpartition(".")[0]


def _explain(error: ValidationError, sources: Mapping[str, str]) -> str:
    lines = []
    for detail in error.errors(include_url=False, include_context=False):
        key = ".".join(str(part) for part in detail["loc"] if part != "[key]")
        if detail["type"] == "value_error":  # a section that checks itself; its message names field, value and what is allowed
            lines.append(f"{key}: {detail['msg'].removeprefix('Value error, ')}")
        else:
            source = next((sources[part] for part in _with_parents(key) if part in sources), "default")
            lines.append(f"{key} = {detail['input']!r} ({source}) is not allowed: {detail['msg']}")
    return "\n".join(lines)
