"""KV moved in another number format: fewer bytes on the wire, what the format keeps at the other end, and refused if unlike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conductor.core.types import Role
from models.base import KVLayout
from models.kv_codec import BlockCodec, KVCodec
from models.kv_layout import FORMATS
from models.load import load_model
from tests.models.builders import write_tiny_folder
from tests.workers.actor_doubles import PROFILE
from tests.workers.doubles import begin, decode, make_engine, make_prompt, prefill
from workers.assembly import build_parts
from workers.coded_transport import CodedTransport, block_codec, coded_descriptor
from workers.config import WorkerConfig
from workers.device_cache import describe_layout
from workers.kv_transfer.base import KVTransport, LayoutMismatch
from workers.kv_transfer.blocks import KVBlocks
from workers.kv_transfer.loopback import Fabric, LoopbackTransport
from workers.sequence import KVSequence

LAYOUT = KVLayout("gqa", 1, 2, (2, 2, 16), torch.float32)
BLOCK_TOKENS = 16
LEASE_S = TIMEOUT_S = 30.0


def coded(name: str, fabric: Fabric, layout: KVLayout = LAYOUT) -> KVTransport:
    codec = BlockCodec(name, layout, BLOCK_TOKENS)
    return CodedTransport(LoopbackTransport(coded_descriptor(describe_layout(layout, BLOCK_TOKENS), codec), fabric), codec)


def blocks(count: int, layout: KVLayout = LAYOUT) -> list[np.ndarray]:
    shape = (count, BLOCK_TOKENS * layout.elements)
    layers = [torch.randn(*shape, generator=torch.Generator().manual_seed(i)) for i in range(layout.num_layers)]
    return [layer.to(layout.dtype).view(torch.uint8).numpy() for layer in layers]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_arrives_is_what_the_format_keeps_of_it(name: str, dtype: torch.dtype) -> None:
    """Every element within the codec's own bound, in exactly the bytes that the layout module counts."""
    layout = replace(LAYOUT, dtype=dtype)
    source, target = (coded(name, fabric, layout) for fabric in [{}] * 2)
    sent = blocks(3, layout)
    ticket = source.offer(KVBlocks.of(sent), LEASE_S)
    came_back = [np.zeros_like(layer) for layer in sent]
    target.fetch(ticket, KVBlocks.of(came_back), TIMEOUT_S)
    assert ticket.nbytes == 2 * 3 * BLOCK_TOKENS * FORMATS[name].bytes_for(layout.elements)
    for before, after in zip(sent, came_back, strict=True):
        was = torch.from_numpy(before).view(dtype).float().view(3, BLOCK_TOKENS, -1)
        came = torch.from_numpy(after).view(dtype).float().view(3, BLOCK_TOKENS, -1)
        allowed = KVCodec(name, layout.elements).max_error(was) * 1.001 + 1e-6
        if dtype is torch.bfloat16:
            allowed = allowed + was.abs() * 2**-8 + allowed * 2**-8
        assert bool(((came - was).abs() <= allowed).all())
    source.release(ticket.id)
    assert source.offered == 0


def test_unlike_formats_are_refused() -> None:
    """A worker with another codec, or none, must not read the bytes as its own."""
    fabric: Fabric = {}
    ticket = coded("fp8", fabric).offer(KVBlocks.of(blocks(1)), LEASE_S)
    for other in (coded("int8", fabric), LoopbackTransport(describe_layout(LAYOUT, BLOCK_TOKENS), fabric)):
        with pytest.raises(LayoutMismatch):
            other.fetch(ticket, KVBlocks.of(blocks(1)), TIMEOUT_S)


def test_blocks_of_another_size_are_refused() -> None:
    codec = BlockCodec("fp8", LAYOUT, BLOCK_TOKENS)
    for wrong in (torch.zeros(1, 7, dtype=torch.uint8), torch.zeros(1, codec.plain_layer_block_bytes)):
        with pytest.raises(ValueError, match=r"blocks are .*; expected uint8"):
            codec.encode(wrong)
    with pytest.raises(ValueError, match="expected uint8"):
        codec.decode(torch.zeros(1, codec.plain_layer_block_bytes, dtype=torch.uint8))


def test_the_caches_own_format_needs_no_codec() -> None:
    assert block_codec(None, LAYOUT, 16) is None
    assert block_codec("fp32", LAYOUT, 16) is None
    assert block_codec("bf16", replace(LAYOUT, dtype=torch.bfloat16), 16) is None
    assert block_codec("fp16", replace(LAYOUT, dtype=torch.bfloat16), 16) is not None
    assert block_codec("bf16", LAYOUT, 16) is not None


@pytest.mark.parametrize(("name", "error"), [("bf16", 0.02), ("fp8", 0.2), ("int8", 0.1)])
def test_decode_goes_on_from_coded_kv(tmp_path: Path, name: str, error: float) -> None:
    """A hand-over in fewer bytes leaves the logits where the format's precision leaves them."""
    write_tiny_folder(tmp_path, "llama", head_dim=16, num_hidden_layers=2)
    model = load_model(str(tmp_path)).model
    home, away = (make_engine(8, 16, model) for _ in range(2))
    tokens = tuple((7 * i) % 91 + 2 for i in range(45))
    sequence = begin(home, make_prompt(tokens, 8, 16))
    first = prefill(home, sequence)
    source, target = (coded(name, fabric, model.layout) for fabric in [{}] * 2)
    adopted = away.adopt(make_prompt(tokens, 8, 16))
    assert isinstance(adopted, KVSequence)
    ticket = source.offer(home.cache.blocks(sequence.table), LEASE_S)
    away.receive(adopted, range(ticket.blocks), lambda into, skip: target.fetch(ticket, into, TIMEOUT_S, skip))
    away.complete(adopted, first)
    exact, moved = (
        torch.stack([layer[engine_table].flatten(0, 1)[:45] for layer in engine.cache.paged.layers])
        for engine, engine_table in ((home, sequence.table), (away, adopted.table))
    )
    assert 0 < float((moved - exact).norm() / exact.norm()) < error
    decode(away, [adopted], 3)
    assert adopted.output_tokens == 4
    home.finish(sequence)
    away.finish(adopted)


def test_a_workers_parts_speak_the_configured_format(tmp_path: Path) -> None:
    """The profile counts the bytes that move, so the scheduler foresees the smaller transfer."""
    write_tiny_folder(tmp_path, "llama")
    config = WorkerConfig(
        worker_id="p0",
        role=Role.PREFILL,
        model=str(tmp_path),
        num_blocks=8,
        block_tokens=16,
        transport="loopback",
        transport_codec="fp8",
        profile=PROFILE,
    )
    parts = build_parts(config)
    assert parts.profile.kv_bytes_per_token == 3 * FORMATS["fp8"].bytes_for(2 * 2 * 16)
    assert parts.transports["loopback"].protocol.endswith(", fp8")
    assert build_parts(replace(config, transport_codec=None)).profile == PROFILE
    with pytest.raises(ValueError, match="transport_codec is 'fp7'; allowed: fp32, bf16"):
        replace(config, transport_codec="fp7")
