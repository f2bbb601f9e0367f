"""From a worker's configuration to its collaborators: model, device cache, engine, transport, cost profile.

The only place in this package that loads weights. An actor takes the function that builds its parts as an argument, so tests
and other models put theirs in its place. A worker without a measured profile says that it is not calibrated (no samples).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from conductor.core.cost_profile import CostProfile
from conductor.core.hashing import KVNamespace
from conductor.core.messages import SamplingParams
from conductor.core.types import BlockHash
from models.base import KVLayout
from models.load import load_model
from workers.config import WorkerConfig
from workers.device_cache import DeviceCache
from workers.engine import Engine
from workers.kv_transfer.base import KVTransport
from workers.kv_transfer.select import make_transport
from workers.sequence import KVSequence, Prompt


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """`root_of(domain)` is the hash that the first block of a prompt of a cache domain chains to."""

    engine: Engine
    transport: KVTransport
    profile: CostProfile
    model_name: str
    root_of: Callable[[str], BlockHash]


Build: TypeAlias = Callable[[WorkerConfig], WorkerParts]


def build_parts(config: WorkerConfig) -> WorkerParts:
    """Load the model and everything around it. Raises `ModelError`, `ValueError` or `TransportUnavailable`."""
    torch.set_num_threads(config.threads)
    loaded = load_model(config.model, device=config.device, dtype=config.compute_dtype, kv_dtype=config.kv_dtype)
    engine = Engine(loaded.model, make_cache(config, loaded.model.layout))
    namespace = loaded.card.namespace
    return WorkerParts(
        engine=engine,
        transport=make_transport(config.transport, engine.cache.kv, config.link),
        profile=config.profile or unmeasured_profile(config, loaded.model.layout),
        model_name=loaded.card.name,
        root_of=lambda domain: KVNamespace(namespace, config.block_tokens, salt=domain).seed,
    )


def make_cache(config: WorkerConfig, layout: KVLayout) -> DeviceCache:
    num_blocks = config.blocks(layout.bytes_per_token * config.block_tokens)
    return DeviceCache(layout, num_blocks, config.block_tokens, config.device)


def unmeasured_profile(config: WorkerConfig, layout: KVLayout) -> CostProfile:
    """What is known without measuring: sizes. Times are placeholders of an uncalibrated profile, which rejects nothing."""
    return CostProfile(
        prefill_base_s=0.0,
        prefill_per_token_s=0.003,
        prefill_per_token2_s=0.0,
        decode_base_s=0.05,
        decode_per_sequence_s=0.0,
        decode_per_context_token_s=0.0,
        kv_bytes_per_token=layout.bytes_per_token,
        block_tokens=config.block_tokens,
        chunk_tokens=config.chunk_tokens,
    )


def warm_up(engine: Engine) -> None:
    """One small prefill and one decode step, so that the first request does not pay for lazy initialisation."""
    tokens = tuple(range(max(1, min(16, engine.model.vocab_size, engine.max_sequence_tokens - 1))))
    sequence = engine.begin(Prompt(tokens, (), 0, SamplingParams(max_tokens=2)))
    assert isinstance(sequence, KVSequence)
    engine.first_token(sequence, engine.prefill_chunk(sequence, len(tokens)))
    if engine.grow(sequence):
        engine.decode_step([sequence])
    engine.finish(sequence)
    engine.cache.evict_idle()
    engine.cache.drain_changes()
