"""Reads a cluster profile: the hardware truth of one kind of node, by the name of a profile that comes with the package or by
the path of a YAML file. A fault names the field, its value and what is allowed."""

from __future__ import annotations

from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from traces.service_time import (
    DecodeTime,
    FlopsPrefill,
    PolynomialPrefill,
    PrefillTime,
    QuadraticPrefill,
    ServiceTime,
    Stages,
)

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
LowerTier: TypeAlias = Literal["host", "disk", "shared"]


class ClusterError(ValueError):
    """A cluster profile cannot be used; the message names file, field, value and what is allowed."""


class Handover(StrEnum):
    """When the KV of a prompt travels to its decode worker."""

    AFTER_PROMPT = "after_prompt"
    STREAMED = "streamed"  # layer by layer while the prompt is computed


class FirstTokenFrom(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class _Values(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StepPolynomialValues(_Values):
    form: Literal["step_polynomial"]
    base_s: NotNegative
    per_token_s: Positive
    per_token2_s: NotNegative

    def truth(self) -> PrefillTime:
        return PolynomialPrefill(self.base_s, self.per_token_s, self.per_token2_s)


class QuadraticValues(_Values):
    form: Literal["quadratic"]
    base_s: NotNegative
    per_token_s: Positive
    per_token2_s: NotNegative
    tile_tokens: Annotated[int, Field(gt=0)]

    def truth(self) -> PrefillTime:
        return QuadraticPrefill(self.base_s, self.per_token_s, self.per_token2_s, self.tile_tokens)


class FlopsValues(_Values):
    form: Literal["flops"]
    layers: Annotated[int, Field(gt=0)]
    hidden: Annotated[int, Field(gt=0)]
    attention_factor: Positive
    linear_factor: Positive
    peak_flops: Positive
    linear_efficiency: Positive
    attention_efficiency: Positive
    half_efficiency_tokens: NotNegative
    tile_tokens: Annotated[int, Field(gt=0)]
    launch_s: NotNegative

    def truth(self) -> PrefillTime:
        return FlopsPrefill(**self.model_dump(exclude={"form"}))


class LinearDecodeValues(_Values):
    form: Literal["linear"]
    base_s: Positive
    per_sequence_s: NotNegative
    per_context_token_s: NotNegative

    def truth(self, capacity_tokens: int) -> DecodeTime:
        return DecodeTime(self.base_s, self.per_sequence_s, self.per_context_token_s)


class ShareDecodeValues(_Values):
    """A step's time as a polynomial of the share of the KV capacity that is in use."""

    form: Literal["capacity_share"]
    base_s: Positive
    per_share_s: NotNegative
    per_share2_s: float

    def truth(self, capacity_tokens: int) -> DecodeTime:
        return DecodeTime(self.base_s, 0.0, self.per_share_s / capacity_tokens, self.per_share2_s / capacity_tokens**2)


class NetworkValues(_Values):
    """`contention` false: every transfer runs at the card's full speed, whatever else does."""

    nic_bytes_per_s: Positive
    latency_s: NotNegative
    contention: bool


class TierValues(_Values):
    """A tier below the device pool: the speed of its channel into a node, and its room in blocks (shared: of the cluster)."""

    bytes_per_s: Positive
    blocks: Annotated[int, Field(ge=0)]


class StorageValues(_Values):
    """The card through which each node reads the shared store."""

    nic_bytes_per_s: Positive


class PipelineValues(_Values):
    """Each prefill worker is a group of `stages` nodes that pass activations on in `hop_s`."""

    stages: Annotated[int, Field(ge=1)]
    hop_s: NotNegative


class ProcessorValues(_Values):
    """What all workers compute on, each step of a worker on one of `count`; not whole where something else takes a part.

    While all of them compute, a step takes `crowding` of what it takes while the others idle.
    """

    count: Annotated[float, Field(gt=0)]
    crowding: Annotated[float, Field(ge=1)] = 1.0


class ClusterProfile(_Values):
    """Hardware truth of one kind of node. `step_variation` is the standard deviation of a prefill step's duration, relative.

    `prefill_blocks` is the device pool of prefill workers where it is not `device_blocks`. Without `storage` the shared store
    is read through the compute network's card. `processors` are None where each worker has its own.
    """

    description: str
    gpus_per_worker: Annotated[int, Field(gt=0)]
    kv_bytes_per_token: Annotated[int, Field(gt=0)]
    block_tokens: Annotated[int, Field(gt=0)]
    step_tokens: Annotated[int, Field(gt=0)]
    max_batch: Annotated[int, Field(gt=0)]
    device_blocks: Annotated[int, Field(gt=0)]
    prefill: Annotated[StepPolynomialValues | QuadraticValues | FlopsValues, Field(discriminator="form")]
    decode: Annotated[LinearDecodeValues | ShareDecodeValues, Field(discriminator="form")]
    network: NetworkValues
    prefill_blocks: Annotated[int, Field(gt=0)] | None = None
    tiers: dict[LowerTier, TierValues] = {}
    storage: StorageValues | None = None
    pipeline: PipelineValues = PipelineValues(stages=1, hop_s=0.0)
    processors: ProcessorValues | None = None
    step_variation: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    chunked_prefill: bool = True
    reuse_blocks: bool = True
    layer_groups: Annotated[int, Field(gt=0)] = 8
    handover: Handover
    first_token: FirstTokenFrom

    def pool_blocks(self, *, prefill_only: bool) -> int:
        """Device pool of a worker."""
        return self.prefill_blocks if self.prefill_blocks is not None and prefill_only else self.device_blocks

    @property
    def capacity_tokens(self) -> int:
        return self.device_blocks * self.block_tokens

    def service_time(self) -> ServiceTime:
        """The truth that workers of this profile run by."""
        stages = Stages(self.pipeline.stages, self.pipeline.hop_s)
        return ServiceTime(self.prefill.truth(), self.decode.truth(self.capacity_tokens), stages)


def profile_names() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(entry.name[:-5] for entry in resources.files("traces.clusters").iterdir() if entry.name.endswith(".yaml"))


def load_profile(name_or_path: str) -> ClusterProfile:
    """The profile of that name, or in that file. Raises ClusterError."""
    if name_or_path in profile_names():
        text = resources.files("traces.clusters").joinpath(f"{name_or_path}.yaml").read_text(encoding="utf-8")
    else:
        text = _read(name_or_path)
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ClusterError(f"cluster profile {name_or_path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ClusterError(f"cluster profile {name_or_path} is {values!r}; allowed: a mapping of fields")
    try:
        return ClusterProfile.model_validate(values)
    except ValidationError as error:
        raise ClusterError(_explain(name_or_path, error)) from error


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        allowed = ", ".join(profile_names())
        raise ClusterError(f"cluster is {path!r}; allowed: {allowed}, or a readable YAML file ({error})") from error


def _explain(name: str, error: ValidationError) -> str:
    lines = []
    for fault in error.errors():
        place = ".".join(str(part) for part in fault["loc"])
        lines.append(
            f"cluster profile {name}: {place} is {fault['input']!r}; allowed: {fault['msg'].removeprefix('Input should be ')}"
        )
    return "\n".join(lines)
