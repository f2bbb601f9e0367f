"""The compiled kernels: what torch computes, whoever shares the batch, on every kind of processor, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import pytest
import torch
import torch.nn.functional as F
from gguf.quants import dequantize, quantize
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models import native_kernels
from models.base import ForwardBatch, PagedKVCache
from models.linear import FloatLinear, Int4Linear, Int8Linear
from models.load import load_model
from models.native_kernels import FLAGS, HEAD_DIMS, BuildError, Kernels, build
from models.paged_attention import Softmax, attend, plan_batch, write_kv
from models.rotary import rotate
from models.stored_weights import stored_tensors
from tests.models.builders import write_tiny_folder
from tests.models.contract import check_all

KINDS = {"native": FLAGS, "avx2": (*FLAGS, "-march=haswell"), "plain": (*FLAGS, "-march=x86-64")}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=KINDS, scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The same source for this processor, and for lesser ones that it can stand in for."""
    return Kernels(build(KINDS[request.param]))


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_kernels, "kernels", lambda: None)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 48), (7, 40, 33), (32, 7, 3), (33, 42, 101), (77, 576, 48)])
@pytest.mark.parametrize("biased", [False, True])
def test_float_products_are_torchs(kernels: Kernels, rows: int, inputs: int, outputs: int, biased: bool) -> None:
    x, weight = random(rows, inputs), random(outputs, inputs, seed=1)
    bias = random(outputs, seed=2) if biased else None
    torch.testing.assert_close(kernels.linear_float(x, weight, bias), F.linear(x, weight, bias), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 48), (7, 40, 33), (13, 576, 100), (50, 7, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_int8_products_are_those_of_the_rounded_weights(
    kernels: Kernels, rows: int, inputs: int, outputs: int, biased: bool
) -> None:
    """What is lost is lost by rounding the weights: activations of 16 bits add next to nothing."""
    x, weight = random(rows, inputs), random(outputs, inputs, seed=1)
    linear = Int8Linear(weight, random(outputs, seed=2) if biased else None)
    found = kernels.linear_int8(x, linear.packed, linear.scales, linear.bias, outputs)
    torch.testing.assert_close(found, F.linear(x, linear.expanded(), linear.bias), atol=2e-3, rtol=2e-4)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 48), (7, 40, 33), (13, 576, 100)])
@pytest.mark.parametrize("biased", [False, True])
def test_int4_products_are_those_of_the_rounded_weights(
    kernels: Kernels, rows: int, inputs: int, outputs: int, biased: bool
) -> None:
    linear = Int4Linear(random(outputs, inputs, seed=1), random(outputs, seed=2) if biased else None)
    x = random(rows, inputs)
    found = kernels.linear_int4(x, linear.packed, (linear.scales, linear.least), linear.bias, outputs)
    torch.testing.assert_close(found, F.linear(x, linear.expanded(), linear.bias), atol=2e-3, rtol=2e-4)
    alone = kernels.linear_int4(x[:1].contiguous(), linear.packed, (linear.scales, linear.least), linear.bias, outputs)
    assert torch.equal(alone[0], found[0])


def test_int4_keeps_weights_of_sixteen_steps_as_they_are() -> None:
    """Such as come from a Q4_1 file; others are off by half a step of their group."""
    steps = torch.randint(0, 16, (20, 64), generator=torch.Generator().manual_seed(4))
    steps[:, ::32], steps[:, 1::32] = 0, 15
    scales = random(20, 2, seed=5).abs().repeat_interleave(32, dim=1)
    weight = steps * scales - 0.3
    torch.testing.assert_close(Int4Linear(weight).expanded(), weight, atol=1e-6, rtol=1e-6)
    free = random(20, 64)
    spread = free.unflatten(1, (-1, 32)).amax(dim=-1) - free.unflatten(1, (-1, 32)).amin(dim=-1)
    assert bool(((Int4Linear(free).expanded() - free).abs() <= (spread / 30 * 1.01).repeat_interleave(32, dim=1)).all())
    assert torch.equal(Int4Linear(torch.zeros(3, 5)).expanded(), torch.zeros(3, 5))


def stored(name: str, rows: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]]:
    """Random weights in a GGUF format: as floats, and as the kernels take them."""
    kind = gguf.GGMLQuantizationType[name]
    blocks = quantize(random(rows, inputs, seed=1).numpy(), kind)
    held = {key: torch.from_numpy(value) for key, value in stored_tensors("w", [(kind, blocks)]).items()}
    return torch.from_numpy(dequantize(blocks, kind)), held["w.packed"], (held["w.scales"], held.get("w.least"))


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 7, 32, 96])
def test_weights_of_a_file_are_decoded_to_the_very_floats(kernels: Kernels, name: str, rows: int) -> None:
    """Rows of the identity pick single weights, which nothing is added to."""
    weight, packed, scales = stored(name, 70, 96)
    assert torch.equal(kernels.linear_stored(torch.eye(96)[:rows], packed, scales, None, 70), weight.T[:rows])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("biased", [False, True])
def test_products_with_weights_of_a_file_are_torchs(kernels: Kernels, name: str, biased: bool) -> None:
    """In any batch of few rows, and in any chunk of many, a row gets the same bits."""
    weight, packed, scales = stored(name, 300, 96)
    x, bias = random(90, 96), random(300, seed=2) if biased else None
    for rows, part in ((23, slice(5, 6)), (23, slice(2, 9)), (90, slice(20, 60))):
        found = kernels.linear_stored(x[:rows], packed, scales, bias, 300)
        torch.testing.assert_close(found, F.linear(x[:rows], weight, bias), atol=1e-4, rtol=1e-5)
        assert torch.equal(kernels.linear_stored(x[part], packed, scales, bias, 300), found[part])


def test_int8_products_have_the_same_bits_on_every_processor() -> None:
    """Integers are exact and scales are added in one order, so workers of different kinds agree to the bit."""
    x, linear = random(20, 96) * 50, Int8Linear(random(64, 96, seed=1))
    with_fma = [Kernels(build(KINDS[kind])) for kind in ("native", "avx2")]
    one, other = (each.linear_int8(x, linear.packed, linear.scales, None, 64) for each in with_fma)
    assert torch.equal(one, other)


def test_int8_weights_are_off_by_half_a_step_of_their_group() -> None:
    weight = random(50, 100) * torch.logspace(-3, 3, 100)
    linear = Int8Linear(weight)
    steps = F.pad(weight, (0, 28)).unflatten(1, (-1, 32)).abs().amax(dim=-1) / 127
    allowed = steps.repeat_interleave(32, dim=1)[:, :100] * 0.501
    assert bool(((linear.expanded() - weight).abs() <= allowed).all())
    assert torch.equal(Int8Linear(torch.zeros(3, 5)).expanded(), torch.zeros(3, 5))


def test_large_activations_leave_small_ones_whole(kernels: Kernels) -> None:
    """One outlier of a row costs only its own group of 32 some precision; that is what ruins eight-bit activations."""
    x = random(1, 64)
    x[0, 0] = 1e4
    linear = Int8Linear(random(16, 64, seed=1))
    linear.scales[:, 0] = 0  # leave the outlier's group out of the sum
    found = kernels.linear_int8(x, linear.packed, linear.scales, None, 16)
    torch.testing.assert_close(found, F.linear(x, linear.expanded()), atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("threads")
def test_a_row_gets_the_same_bits_alone_and_in_any_batch(kernels: Kernels) -> None:
    """Batch and threads decide who computes, not in which order numbers are added."""
    x, weight = random(23, 96), random(70, 96, seed=1)
    linear = Int8Linear(weight)
    all_float = kernels.linear_float(x, weight, None)
    all_int8 = kernels.linear_int8(x, linear.packed, linear.scales, None, 70)
    for row in (0, 5, 22):
        alone = x[row : row + 1].contiguous()
        assert torch.equal(kernels.linear_float(alone, weight, None)[0], all_float[row])
        assert torch.equal(kernels.linear_int8(alone, linear.packed, linear.scales, None, 70)[0], all_int8[row])


@pytest.mark.parametrize("size", [5, 64, 100])
def test_norms_and_gates_are_torchs(kernels: Kernels, size: int) -> None:
    x = random(6, size) * 30
    weight = random(size, seed=1)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), F.rms_norm(x, (size,), weight, 1e-5), atol=1e-5, rtol=1e-5)
    both = random(6, 2 * size) * 30
    expected = F.silu(both[:, :size]) * both[:, size:]
    torch.testing.assert_close(kernels.gate(both), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_rotation_and_attention_are_torchs(kernels: Kernels, dim: int, dtype: torch.dtype, without_kernels: None) -> None:
    """Keys and values of scattered sequences of 1 to 700 tokens land in their slots; every head sees its context."""
    heads, kv_heads, size = 6, 2, 16
    lengths, tables = [1, 37, 700], [[50], [3, 1, 9], list(range(49, 4, -1))]
    layer, expected_layer = ((random(51, size, 2, kv_heads, dim) * 2).to(dtype) for _ in range(2))
    qkv, positions = random(3, heads + 2 * kv_heads, dim, seed=1) * 2, torch.tensor(lengths) - 1
    angles = (random(3, 1, dim, seed=2), random(3, 1, dim, seed=3))
    turned = rotate(qkv[:, : heads + kv_heads], *angles)
    cache = PagedKVCache.__new__(PagedKVCache)
    cache.layers, cache.block_tokens, cache.num_blocks = [expected_layer], size, 51
    batch = ForwardBatch(torch.zeros(3, dtype=torch.long), [1] * 3, positions.tolist(), tables)
    plan = plan_batch(batch, cache, torch.float32)
    write_kv(expected_layer, plan.slots, turned[:, heads:], qkv[:, heads + kv_heads :])
    flat = qkv.flatten(1).clone()
    kernels.rotate_and_store(flat, angles, layer, plan.slots, heads)
    torch.testing.assert_close(layer, expected_layer, atol=1e-6, rtol=1e-6 if dtype is torch.float32 else 1e-2)
    queries = flat.view(3, -1, dim)[:, :heads]
    torch.testing.assert_close(queries, turned[:, :heads], atol=1e-6, rtol=1e-6)
    assert plan.decode is not None
    for first, cap in ((0, None), (0, 20.0), (30, None)):
        seen = (plan.decode.tables, torch.tensor([0, first, first]), plan.decode.lengths)
        found = kernels.attend_decode(queries, expected_layer, seen, 0.1, cap)
        if first == 0:
            expected = attend(queries, expected_layer, plan, Softmax(0.1, cap))
        else:
            windowed = plan_batch(batch, cache, torch.float32)
            hidden = torch.arange(windowed.decode.max_tokens) < seen[1][:, None]  # type: ignore[union-attr]
            windowed.decode.mask.masked_fill_(hidden[:, None, None], float("-inf"))  # type: ignore[union-attr]
            expected = attend(queries, expected_layer, windowed, Softmax(0.1, cap))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@dataclass(frozen=True)
class Asked:
    """A chunk of `new` tokens after `context` others, in shuffled blocks of `size` tokens."""

    new: int
    context: int
    size: int
    kv_heads: int
    share: int
    dim: int
    window: int | None = None
    replay: bool = False
    cap: float | None = None
    dtype: torch.dtype = torch.float32
    rounded: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (-(-(self.context + self.new) // self.size) + 3, self.size, 2, self.kv_heads, self.dim)


def attended(asked: Asked, kernels: Kernels | None, monkeypatch: pytest.MonkeyPatch, parts: Sequence[int]) -> torch.Tensor:
    """Attention of the chunk, computed in `parts` one after the other."""
    monkeypatch.setattr(native_kernels, "kernels", lambda: kernels)
    cache = PagedKVCache.__new__(PagedKVCache)
    cache.layers, cache.block_tokens, cache.num_blocks = (
        [(random(*asked.shape) * 2).to(asked.dtype)],
        asked.size,
        asked.shape[0],
    )
    table = torch.randperm(asked.shape[0], generator=torch.Generator().manual_seed(3)).tolist()
    rows = random(asked.new, (asked.share + 2) * asked.kv_heads, asked.dim, seed=1) * 2
    queries, softmax, found, start = rows[:, : asked.share * asked.kv_heads], Softmax(None, asked.cap, asked.rounded), [], 0
    for part in parts:
        ids = torch.zeros(part, dtype=torch.long)
        batch = ForwardBatch(ids, [part], [asked.context + start], [table], replay=asked.replay)
        plan = plan_batch(batch, cache, torch.float32, asked.window)
        found.append(attend(queries[start : start + part], cache.layers[0], plan, softmax))
        start += part
    return torch.cat(found)


chunks = st.builds(
    Asked,
    new=st.integers(2, 110),
    context=st.integers(0, 220),
    size=st.sampled_from([4, 16, 24, 64, 128]),
    kv_heads=st.integers(1, 3),
    share=st.sampled_from([1, 2, 3, 7]),
    dim=st.sampled_from(HEAD_DIMS),
    window=st.none() | st.integers(1, 200),
    replay=st.booleans(),
    cap=st.sampled_from([None, 20.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rounded=st.booleans(),
)


@given(asked=chunks, kind=st.sampled_from(sorted(KINDS)))
@example(Asked(64, 2048, 64, 3, 3, 64), "native")
@example(Asked(64, 2048, 64, 3, 3, 64, rounded=True), "native")
@settings(max_examples=50, deadline=None)
def test_attention_of_a_chunk_is_torchs(asked: Asked, kind: str) -> None:
    """Whatever the lengths, blocks, heads and windows: the tiles and the sums as they go are those of plain attention; 16 bits
    change a few parts in ten thousand, and single numbers by more, since these logits reach far beyond a model's."""
    with pytest.MonkeyPatch.context() as patch:
        expected = attended(asked, None, patch, [asked.new])
        found = attended(asked, Kernels(build(KINDS[kind])), patch, [asked.new])
    close = 3e-2 if asked.rounded else 1e-4
    torch.testing.assert_close(found, expected, atol=close, rtol=close)
    assert float((found - expected).norm() / expected.norm()) < (2e-3 if asked.rounded else 1e-4)


@pytest.mark.parametrize("outlier", [1.0, 1e4, 1e15, 0.0])
def test_rounded_attention_holds_keys_queries_and_values_of_any_size(kernels: Kernels, outlier: float) -> None:
    """No sum of 16-bit products leaves 32 bits, and nothing that is all zeros is divided by."""
    layer, queries = random(3, 64, 2, 2, 64), random(70, 4, 64, seed=1)
    layer[:, 5, 1] *= outlier
    layer[:, 9, 0] *= min(outlier, 1e4)
    queries[3] *= min(outlier, 1e2)
    exact, rounded = torch.empty(2, 70, 4, 64)
    seen = native_kernels.Seen(torch.arange(3), 150, 0, None)
    for out, how in ((exact, False), (rounded, True)):
        kernels.attend_chunk(queries, layer, seen, (0.125, None), out, rounded=how)
    assert float((rounded - exact).norm() / exact.norm()) < 2e-3


@given(asked=chunks, first=st.integers(2, 100))
@settings(max_examples=30, deadline=None)
def test_a_token_attends_to_the_same_bits_in_any_chunk(asked: Asked, first: int) -> None:
    """Where the prompt is cut decides who computes, not in which order numbers are added."""
    kernels = native_kernels.kernels()
    parts = [first, asked.new - first] if asked.new - first >= 2 else [asked.new]
    plain = replace(asked, replay=False, size=64)
    with pytest.MonkeyPatch.context() as patch:
        whole, cut = (attended(plain, kernels, patch, each) for each in ([plain.new], parts))
    assert torch.equal(whole, cut)


@pytest.mark.usefixtures("threads")
def test_a_row_of_many_gets_the_same_bits_in_any_chunk(kernels: Kernels) -> None:
    x, weight = random(90, 100), random(70, 100, seed=1)
    whole = kernels.linear_float(x, weight, None)
    for start, stop in ((0, 33), (20, 90), (41, 80)):
        assert torch.equal(kernels.linear_float(x[start:stop], weight, None), whole[start:stop])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("weight_format", ["full", "int8"])
def test_models_without_kernels_keep_every_promise(
    tmp_path: Path, kind: str, weight_format: str, without_kernels: None
) -> None:
    """Chunks, batches, reused prefixes and hand-overs by torch alone."""
    write_tiny_folder(tmp_path, kind, head_dim=16)
    check_all(load_model(str(tmp_path), weight_format=weight_format).model)


@pytest.mark.parametrize("biased", [False, True])
def test_few_rows_and_many_are_the_same_product(biased: bool) -> None:
    """The switch from one kernel to the other, by the number of rows, is not to be seen."""
    linear = FloatLinear(random(40, 64), random(40, seed=1) if biased else None)
    x = random(native_kernels.FEW_ROWS + 1, 64, seed=2)
    torch.testing.assert_close(linear(x)[:-1], linear(x[:-1].contiguous()), atol=1e-5, rtol=1e-5)


def test_a_compiler_that_fails_is_named_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONDUCTOR_CACHE", str(tmp_path))
    with pytest.raises(BuildError, match=r"failed: .*no-such-flag"):
        build(("-no-such-flag",))
    with pytest.raises(BuildError, match="did not run"):
        build(compiler="/no/such/compiler")
    assert list((tmp_path / "kernels").glob("*.so")) == []


def test_without_a_compiler_torch_computes_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CONDUCTOR_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    native_kernels.kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert native_kernels.usable(random(2, 2)) is None
        assert "there is no C++ compiler" in caplog.text
    finally:
        native_kernels.kernels.cache_clear()


def test_kernels_take_contiguous_float32_on_the_cpu_alone() -> None:
    assert native_kernels.usable(random(4, 4)) is native_kernels.kernels()
    assert native_kernels.usable(random(4, 4).T) is None
    assert native_kernels.usable(random(4, 4).bfloat16()) is None
