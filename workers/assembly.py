"""From a worker's configuration to its collaborators: model, device cache, engine, transport, tiers, cost profile.

The only place in this package that loads weights. An actor takes the function that builds its parts as an argument, so tests
and other models put theirs in its place.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import ray
import torch

from conductor.core.cost_profile import CostProfile
from conductor.core.hashing import KVNamespace
from conductor.core.messages import SamplingParams
from conductor.core.types import BlockHash, Tier
from models.base import CausalLM, KVLayout
from models.folder import namespace_in_formats
from models.graphed_decode import GraphedDecode
from models.kv_codec import BlockCodec
from models.llama import Llama
from models.load import LoadedModel, load_model
from models.native_kernels import kernels
from models.stages import WHOLE, Share
from workers.coded_tier import AT_REST, CodedTier, packed_format
from workers.coded_transport import CodedTransport, block_codec, coded_descriptor
from workers.config import WorkerConfig
from workers.cost_fit import FittedProfile
from workers.device_cache import DeviceCache
from workers.engine import Engine
from workers.exchange import Exchange, LocalExchange
from workers.global_tier import GlobalLayersTier, global_format, global_layers
from workers.kv_store.base import BlockFormat, KVTier
from workers.kv_store.opening import OpenedTiers, open_tiers
from workers.kv_store.settings import StoreSettings
from workers.kv_transfer.base import KVDescriptor, KVTransport
from workers.kv_transfer.blocks import KVBlocks
from workers.kv_transfer.paired import PairedTransports
from workers.kv_transfer.select import make_transports
from workers.kv_transfer.throttled import LinkLimit
from workers.needed_state import window_blocks
from workers.processors import bind_process
from workers.profiler import Profiler
from workers.ray_stage import start_stages
from workers.sequence import KVSequence, Prompt
from workers.stage import StageParts
from workers.staged import Chain, StagedExchange, StagedModel

logger = logging.getLogger(__name__)

PROFILE_LEASE_S = 60.0
PROBE = KVDescriptor("probe", 1, "uint8", (1,), num_layers=1, block_tokens=1, layer_block_bytes=1 << 16)


MakeExchange: TypeAlias = Callable[[DeviceCache, PairedTransports, float], Exchange]  # of a pool, with a lease in seconds


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """`root_of(domain)` is the hash that the first block of a prompt of a cache domain chains to."""

    engine: Engine
    transports: Mapping[str, KVTransport]  # by name, in order of preference
    profile: CostProfile
    model_name: str
    root_of: Callable[[str], BlockHash]
    tiers: OpenedTiers = field(default_factory=OpenedTiers)
    exchange: MakeExchange = LocalExchange


Build: TypeAlias = Callable[[WorkerConfig], WorkerParts]


@dataclass(frozen=True, slots=True)
class Computing:
    """What computes, over which pool, and where else blocks of that pool lie."""

    loaded: LoadedModel
    model: CausalLM
    cache: DeviceCache
    exchange: MakeExchange = LocalExchange
    close: Callable[[], None] = lambda: None


def build_parts(config: WorkerConfig) -> WorkerParts:
    """Load the model and everything around it. Raises `ModelError`, `ValueError` or `TransportUnavailable`."""
    take_processors(config)
    computing = make_computing(config)
    loaded, layout, replayed = computing.loaded, computing.model.layout, config.store.replay_windows
    engine = Engine(computing.model, computing.cache, replay_windows=replayed or None)
    formats = {"moved": config.transport_codec, "stored": config.store.codec}
    namespace = namespace_in_formats(loaded.card.namespace, config.kv_dtype, replayed=replayed, **formats)
    codec = block_codec(config.transport_codec, loaded.model.layout, config.block_tokens)
    profile = config.profile or throttled_profile(fitted_profile(config, computing).profile, config.link)
    store_codec = block_codec(config.store.codec, loaded.model.layout, config.block_tokens)
    stored = BlockFormat(stored_namespace(config, namespace), engine.cache.kv)
    tiers = make_tiers(config, stored, store_codec, global_layers(layout) if replayed else None)
    moved = profile.kv_bytes_per_token if codec is None else moved_bytes(engine.cache.kv, codec)
    profile = replace(profile, kv_bytes_per_token=moved, tier_bytes_per_s=tiers.speeds())
    return WorkerParts(
        engine=engine,
        transports=coded_transports(config, engine.cache.kv, codec),
        profile=profile if config.stages > 1 else windowed_profile(profile, layout),
        tiers=tiers,
        model_name=loaded.card.name,
        root_of=lambda domain: KVNamespace(namespace, config.block_tokens, salt=domain).seed,
        exchange=computing.exchange,
    )


def take_processors(config: WorkerConfig, stage: int = 0) -> None:
    """Before the first tensor: threads that torch starts stay where they were started. Raises `ValueError`."""
    if config.cpus:
        bind_process(config.cpus[stage], config.threads)
    torch.set_num_threads(config.threads)


def make_computing(config: WorkerConfig) -> Computing:
    if config.stages > 1:
        return make_pipeline(config)
    loaded = load_worker_model(config)
    cache = make_cache(config, loaded.model.layout)
    return Computing(loaded, graphed(loaded.model, cache), cache)


def make_pipeline(config: WorkerConfig) -> Computing:
    """The first stage here, the later ones as actors, which load their layers at the same time."""
    later = start_stages(config, build_stage)
    loaded = load_worker_model(config, Share(0, config.stages))
    first = loaded.model
    assert isinstance(first, Llama)
    cache = make_cache(config, first.layout, first.layers)
    shares = [Share(number, config.stages).layers(first.layout.num_layers) for number in range(1, config.stages)]
    chain = Chain(later, shares, end_process)
    return Computing(loaded, StagedModel(first, chain), cache, partial(StagedExchange, chain), chain.close)


def build_stage(config: WorkerConfig, number: int) -> StageParts:
    """The parts of a later stage of a worker."""
    take_processors(config, number)
    model = load_worker_model(config, Share(number, config.stages)).model
    assert isinstance(model, Llama)
    cache = make_cache(config, model.layout, model.layers)
    codec = block_codec(config.transport_codec, model.layout, config.block_tokens)
    return StageParts(model, cache, coded_transports(config, cache.kv, codec))


def end_process(reason: str) -> None:
    """A worker that has lost a stage is lost: whoever watches it starts all of it again."""
    logger.error("this prefill worker ends: %s", reason)
    os._exit(1)


def load_worker_model(config: WorkerConfig, share: Share = WHOLE) -> LoadedModel:
    return load_model(
        config.model,
        device=config.device,
        dtype=config.compute_dtype,
        kv_dtype=config.kv_dtype,
        weight_format=config.weights,
        share=share,
    )


def graphed(model: CausalLM, cache: DeviceCache) -> CausalLM:
    """The model with its decode steps as CUDA graphs, where it runs on a CUDA device and its family can."""
    on_cuda = cache.paged.layers[0].device.type == "cuda"
    return GraphedDecode(model, cache.paged) if on_cuda and isinstance(model, Llama) else model


def coded_transports(config: WorkerConfig, kv: KVDescriptor, codec: BlockCodec | None) -> Mapping[str, KVTransport]:
    if codec is None:
        return make_transports(config.transport, kv, config.link)
    plain = make_transports(config.transport, coded_descriptor(kv, codec), config.link)
    return {name: CodedTransport(transport, codec) for name, transport in plain.items()}


def make_tiers(
    config: WorkerConfig, block_format: BlockFormat, codec: BlockCodec | None, layers: Sequence[int] | None = None
) -> OpenedTiers:
    """`layers`: those that the shared tier keeps, by default all."""
    if config.stages > 1:
        return OpenedTiers()  # tiers keep a block as one row of all its layers
    store, node = in_cluster(config.store), node_of(config)
    kept = dict.fromkeys(AT_REST, block_format)
    if layers is not None:
        kept[Tier.SHARED] = global_format(block_format, layers)
    stored = {tier: one if codec is None else packed_format(one, codec) for tier, one in kept.items()}
    opened = open_tiers(store, block_format, node, stored)

    def wrapped(tier: KVTier) -> KVTier:
        if codec is not None and tier.tier in AT_REST:
            tier = CodedTier(tier, kept[tier.tier], codec)
        return GlobalLayersTier(tier, block_format, layers) if layers is not None and tier.tier is Tier.SHARED else tier

    return replace(opened, tiers=tuple(wrapped(tier) for tier in opened.tiers))


def moved_bytes(kv: KVDescriptor, codec: BlockCodec) -> int:
    """Of one token, when it moves in a codec's format."""
    return kv.num_layers * codec.layer_block_bytes // kv.block_tokens


def windowed_profile(profile: CostProfile, layout: KVLayout) -> CostProfile:
    """The same worker, which leaves behind window state when it pulls; a worker in stages pulls blocks in all layers."""
    layers = sum(layout.has_window(layer) for layer in range(layout.num_layers))
    return replace(
        profile,
        kv_window_bytes_per_token=profile.kv_bytes_per_token * layers // layout.num_layers,
        kv_window_tokens=window_blocks(layout, profile.block_tokens) * profile.block_tokens,
    )


def node_of(config: WorkerConfig) -> str:
    """The host whose memory and disk the worker shares."""
    return config.node or socket.gethostname()


def stored_namespace(config: WorkerConfig, namespace: tuple[str, ...]) -> str:
    """Everything that the values of KV depend on: tiers outlive a configuration, and other clusters read them."""
    return "/".join([*namespace, f"weights {config.weights}", f"computed in {config.compute_dtype}"])


def in_cluster(store: StoreSettings) -> StoreSettings:
    """With the address of the Ray cluster in the deployment's name: all workers of a host in it share memory, whoever started
    them, and those of another cluster do not."""
    if not ray.is_initialized():
        return store
    return replace(store, deployment=f"{store.deployment}-{ray.get_runtime_context().gcs_address}")


def profile_worker(config: WorkerConfig, *, fresh: bool) -> FittedProfile:
    """What `build_parts` would go by, with how well it fits; measured if it is not remembered or if `fresh` asks for it."""
    take_processors(config)
    computing = make_computing(config)
    try:
        return fitted_profile(config, computing, fresh=fresh)
    finally:
        computing.close()


def fitted_profile(config: WorkerConfig, computing: Computing, *, fresh: bool = False) -> FittedProfile:
    """The profile of this model on this machine. Overwrites the bytes of the cache.

    Transfers are measured over the transport without its throttle, which is no property of the machine.
    """
    transport = next(iter(make_transports(config.transport, PROBE).values()))
    profiler = Profiler(
        computing.model,
        computing.cache.paged,
        chunk_tokens=config.chunk_tokens,
        budget_s=config.profile_budget_s,
        transfer=lambda nbytes: round_trip(transport, nbytes),
    )
    fitted = profiler.load_or_measure(computing.loaded.card.revision, computed_by(config), fresh=fresh)
    transport.close()
    return fitted


def computed_by(config: WorkerConfig) -> str:
    """What, besides model and machine, decides how fast a worker computes."""
    native = config.device == "cpu" and config.compute_dtype == "float32" and kernels() is not None
    stages = () if config.stages == 1 else (f"{config.stages} stages",)
    bound = ("bound",) if config.cpus else ()  # to which processors is not told apart: those of a machine are alike
    return "/".join((config.compute_dtype, config.weights, "native" if native else "torch", *stages, *bound))


def round_trip(transport: KVTransport, nbytes: int) -> None:
    """Move `nbytes`, rounded to whole probe blocks, from memory through the transport into memory, as a hand-over does."""
    memory = np.zeros((max(1, nbytes // PROBE.layer_block_bytes), PROBE.layer_block_bytes), dtype=np.uint8)
    ticket = transport.offer(KVBlocks.of([memory]), PROFILE_LEASE_S)
    transport.fetch(ticket, KVBlocks.of([memory]), PROFILE_LEASE_S)
    transport.release(ticket.id)


def throttled_profile(profile: CostProfile, link: LinkLimit) -> CostProfile:
    """The same worker behind a slower link."""
    limit_bytes_per_s = profile.transfer_bytes_per_s if link.link_gbps is None else link.link_gbps * 1e9 / 8
    return replace(
        profile,
        transfer_latency_s=profile.transfer_latency_s + link.latency_ms / 1000,
        transfer_bytes_per_s=min(profile.transfer_bytes_per_s, limit_bytes_per_s),
    )


def make_cache(config: WorkerConfig, layout: KVLayout, held: range | None = None) -> DeviceCache:
    num_blocks = config.blocks(layout.bytes_per_token * config.block_tokens)
    return DeviceCache(layout, num_blocks, config.block_tokens, config.device, held)


def warm_up(engine: Engine) -> None:
    """One small prefill and one decode step, so that the first request does not pay for lazy initialisation."""
    tokens = tuple(range(max(1, min(16, engine.model.vocab_size, engine.max_sequence_tokens - 1))))
    sequence = engine.begin(Prompt(tokens, (), 0, SamplingParams(max_tokens=2)))
    assert isinstance(sequence, KVSequence)
    logits = engine.prefill_chunk(sequence, len(tokens))
    assert logits is not None
    engine.first_token(sequence, logits)
    if engine.grow(sequence):
        engine.decode_step([sequence])
    engine.finish(sequence)
    engine.cache.evict_idle()
    engine.cache.drain_changes()
