"""The project's own prefill and decode workers over a model that costs nothing, as actors for a real cluster.

All but the model is real: engine, device pool, transports between processes, tiers on memory, disk and a shared directory.
The model's next token depends on every KV entry that it reads, so an answer is wrong at once when a single one is.
"""

from __future__ import annotations

from conductor.core.hashing import hash_blocks
from conductor.core.types import BlockHash
from tests.workers.actor_doubles import PROFILE
from tests.workers.doubles import BLOCK_TOKENS, ROOT, ChainModel
from workers.assembly import WorkerParts, in_cluster, make_cache, node_of
from workers.config import WorkerConfig
from workers.decode import DecodeWorker
from workers.engine import Engine
from workers.kv_store.base import BlockFormat
from workers.kv_store.opening import open_tiers
from workers.kv_transfer.select import make_transports
from workers.prefill import PrefillWorker


def chain_parts(config: WorkerConfig) -> WorkerParts:
    model = ChainModel()
    engine = Engine(model, make_cache(config, model.layout))
    tiers = open_tiers(in_cluster(config.store), BlockFormat("chain", engine.cache.kv), node_of(config))
    transports = make_transports(config.transport, engine.cache.kv, config.link)
    return WorkerParts(engine, transports, PROFILE, "chain", lambda domain: ROOT, tiers)


class ChainPrefill(PrefillWorker):
    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config, chain_parts)


class ChainDecode(DecodeWorker):
    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config, chain_parts)


def hash_prompt(tokens: bytes, domain: str) -> tuple[BlockHash, ...]:
    return hash_blocks(ROOT, tokens, BLOCK_TOKENS)
