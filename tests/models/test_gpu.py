"""The GPU path. What only a CUDA device can show is marked `gpu`; the padding and the buffers of a recorded step are checked
anywhere, with a recording that simply computes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.base import ForwardBatch, PagedKVCache
from models.graphed_decode import GraphedDecode, record_cuda_graph
from models.host_copies import HostCopies
from models.llama import Llama
from models.load import load_model
from tests.models.builders import run, write_tiny_folder
from tests.models.contract import check_all, tokens

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
KINDS = {"llama": ("llama", {}), "qwen3": ("qwen3", {"head_dim": 16}), "window": ("mistral", {"sliding_window": 20})}
LENGTHS = (40, 17, 64)
TABLES = ([3, 1, 9, 2, 21], [5, 4, 22], [20, 11, 12, 13, 14, 23])


def tiny(folder: Path, kind: str, device: str = "cpu") -> Llama:
    name, changes = KINDS[kind]
    write_tiny_folder(folder, name, **changes)
    model = load_model(str(folder), device=device).model
    assert isinstance(model, Llama)
    return model


def decoded(model: Llama, record: Callable[[Callable[[], Tensor]], Callable[[], Tensor]], device: str) -> GraphedDecode:
    """Three sequences, prefilled one by one, that decode together step by step, then two of them: every step's logits are those
    of the plain model."""
    cache, plain = (PagedKVCache(model.layout, 24, 16, device) for _ in range(2))
    graphed = GraphedDecode(model, cache, record)
    for length, table in zip(LENGTHS, TABLES, strict=True):
        for each in (cache, plain):
            run(model, each, tokens(length, seed=length), table)
    for step in range(6):
        kept = 3 if step < 3 else 2
        batch = step_batch(step, LENGTHS[:kept], TABLES[:kept], device)
        torch.testing.assert_close(graphed.forward(batch, cache), model.forward(batch, plain), atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    return graphed


def step_batch(step: int, lengths: Sequence[int], tables: Sequence[Sequence[int]], device: str) -> ForwardBatch:
    ids = torch.tensor([7 * step + place + 2 for place in range(len(lengths))], device=device)
    return ForwardBatch(ids, [1] * len(lengths), [length + step for length in lengths], tables)


@pytest.mark.parametrize("kind", KINDS)
def test_padded_steps_on_kept_buffers_are_the_plain_steps(tmp_path: Path, kind: str) -> None:
    """Repeated sequences, spare blocks under a mask and refilled buffers leave every sequence its own logits and KV."""
    recorded = []

    def record(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        recorded.append(step)
        return step

    graphed = decoded(tiny(tmp_path, kind), record, "cpu")
    assert graphed.recorded_shapes == ((4, 8), (2, 4))
    assert len(recorded) == 2


def test_what_is_not_a_plain_decode_step_is_computed_as_it_is(tmp_path: Path) -> None:
    """Chunks, mixed batches, other caches and layer callbacks never reach a recording; the promises hold all the same."""
    model = tiny(tmp_path, "llama")

    def record(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise AssertionError("recorded")

    check_all(GraphedDecode(model, PagedKVCache(model.layout, 1, 16), record))


def test_copies_to_and_from_the_host_are_exact_without_a_gpu() -> None:
    copies, data = HostCopies(torch.device("cpu")), torch.randn(3, 5)
    assert torch.equal(copies.to_device(copies.to_host(data)), data)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_graphs_replay_the_plain_steps(tmp_path: Path, kind: str) -> None:
    graphed = decoded(tiny(tmp_path, kind, "cuda"), record_cuda_graph, "cuda")
    assert graphed.recorded_shapes == ((4, 8), (2, 4))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_computes_what_the_cpu_computes(tmp_path: Path, kind: str) -> None:
    prompt = tokens(90)
    here = tiny(tmp_path / "cpu", kind)
    there = tiny(tmp_path / "gpu", kind, "cuda")
    expected = run(here, PagedKVCache(here.layout, 8, 16), prompt, range(6))
    found = run(there, PagedKVCache(there.layout, 8, 16, "cuda"), prompt, range(6))
    torch.testing.assert_close(found.cpu(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.gpu
@needs_cuda
def test_kv_leaves_and_enters_a_gpu_whole() -> None:
    """Copies wait for what is being computed, and what follows waits for them."""
    device = torch.device("cuda")
    copies, factor = HostCopies(device), torch.randn(2048, 2048, device=device)
    computed = factor
    for _ in range(8):
        computed = torch.nn.functional.normalize(computed @ factor)
    host = copies.to_host(computed)
    assert host.is_pinned()
    assert torch.equal(host, computed.cpu())
    back = copies.to_device(host * 2)
    assert torch.equal((back + 1).cpu(), host * 2 + 1)
