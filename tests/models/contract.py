"""What every family of models owes: the same logits whatever way the work is cut up, cached, batched or moved."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.base import CausalLM, ForwardBatch
from models.window_state import plan_recompute
from tests.models.builders import new_cache, run

CLOSE = 1e-4  # of logits, absolute and relative
ROUNDED_CLOSE = 6e-3  # where activations are rounded: attention of a chunk in 16 bits, of a single token not at all


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 258, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_chunks(model: CausalLM, cuts: Sequence[int], close: float = CLOSE) -> None:
    """A prompt cut anywhere ends in the logits of one-shot prefill."""
    prompt, cache = tokens(90), new_cache(model)
    expected = run(model, cache, prompt, range(6))
    for start, stop in itertools.pairwise([0, *cuts, len(prompt)]):
        found = run(model, cache, prompt[start:stop], range(10, 16), context=start)
    torch.testing.assert_close(found, expected, atol=close, rtol=close)


def check_batch(model: CausalLM, close: float = CLOSE) -> None:
    """Prefill chunks and decode steps of different lengths share a batch without touching each other."""
    prompts = [tokens(n, seed=n) for n in (40, 17, 1, 64)]
    tables = [[3, 1, 9], [5, 4], [0], [20, 11, 12, 13]]
    cache = new_cache(model)
    run(model, cache, prompts[0][:39], tables[0])
    run(model, cache, prompts[3][:50], tables[3])
    context_lens = [39, 0, 0, 50]
    flat = [token for prompt, context in zip(prompts, context_lens, strict=True) for token in prompt[context:]]
    batch = ForwardBatch(torch.tensor(flat), [1, 17, 1, 14], context_lens, tables)
    expected = [run(model, new_cache(model), prompt, range(6)) for prompt in prompts]
    torch.testing.assert_close(model.forward(batch, cache), torch.stack(expected), atol=close, rtol=close)


def check_decode_batch(model: CausalLM, close: float = CLOSE) -> None:
    """Sequences that decode together, of different lengths, get what each gets alone."""
    prompts = [tokens(n, seed=n) for n in (40, 17, 64)]
    tables = [[3, 1, 9], [5, 4], [20, 11, 12, 13]]
    cache = new_cache(model)
    for prompt, table in zip(prompts, tables, strict=True):
        run(model, cache, prompt[:-1], table)
    last = torch.tensor([prompt[-1] for prompt in prompts])
    batch = ForwardBatch(last, [1, 1, 1], [len(prompt) - 1 for prompt in prompts], tables)
    expected = [run(model, new_cache(model), prompt, range(6)) for prompt in prompts]
    torch.testing.assert_close(model.forward(batch, cache), torch.stack(expected), atol=close, rtol=close)


def check_prefix_reuse(model: CausalLM, close: float = CLOSE) -> None:
    """A second prompt on the blocks of a shared prefix gives what it gives from scratch, and leaves the first one whole."""
    shared, cache = tokens(48), new_cache(model)
    first, second = shared + tokens(20, seed=1), shared + tokens(9, seed=2)
    run(model, cache, first, [2, 5, 7, 8, 9])
    reused = run(model, cache, second[48:], [2, 5, 7, 11], context=48)
    torch.testing.assert_close(reused, run(model, new_cache(model), second, range(6)), atol=close, rtol=close)
    again = run(model, cache, [77], [2, 5, 7, 8, 9], context=len(first))
    torch.testing.assert_close(again, run(model, new_cache(model), [*first, 77], range(6)), atol=close, rtol=close)


def check_hand_over(model: CausalLM) -> None:
    """KV gathered from one worker's cache and scattered into another's, layer group by layer group, gives equal logits."""
    prompt = tokens(50)
    home, away = new_cache(model), new_cache(model)
    run(model, home, prompt, [1, 2, 3, 4])
    layers = model.layout.num_layers
    for group in (range(0, layers - 1), range(layers - 1, layers)):
        away.scatter([9, 0, 17, 3], home.gather([1, 2, 3, 4], group), group)
    expected = run(model, home, [77], [1, 2, 3, 4], context=50)
    torch.testing.assert_close(run(model, away, [77], [9, 0, 17, 3], context=50), expected, atol=1e-5, rtol=1e-5)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Logits after a hit on a prefix: `exact`, and `rebuilt` from window state that was replayed. `untouched`: global state of
    the prefix was left alone."""

    exact: Tensor
    rebuilt: Tensor
    untouched: bool

    @property
    def error(self) -> float:
        return float((self.rebuilt - self.exact).norm() / self.exact.norm())


def replay(model: CausalLM, window: int, replayed: int) -> Replayed:
    """A hit on 64 of 80 tokens that finds no window state, of which the last `replayed` tokens are run again."""
    prompt, cache = tokens(80), new_cache(model)
    run(model, cache, prompt[:64], range(5))
    exact = run(model, new_cache(model), prompt, range(5))
    whole = [layer for layer, width in zip(cache.layers, model.layout.windows, strict=True) if width is None]
    for layer, width in zip(cache.layers, model.layout.windows, strict=True):
        if width is not None:
            layer.fill_(1e3)  # garbage that would show
    before = [layer.clone() for layer in whole]
    plan = plan_recompute(80, global_hit_tokens=64, window_hit=False, window_tokens=window, replay_tokens=replayed)
    ids = torch.tensor(prompt[plan.replayed.start : plan.replayed.stop])
    model.forward(ForwardBatch(ids, [len(ids)], [plan.replayed.start], [range(5)], replay=True), cache)
    untouched = all(torch.equal(x, y) for x, y in zip(before, whole, strict=True))
    return Replayed(exact, run(model, cache, prompt[64:], range(5), context=64), untouched)


def check_exact_replay(model: CausalLM, window: int) -> None:
    """A window layer reaches W-1 tokens back, so as many windows as there are window layers rebuild everything."""
    layers = sum(width is not None for width in model.layout.windows)
    found = replay(model, window, min(64, layers * window))
    torch.testing.assert_close(found.rebuilt, found.exact, atol=2e-4, rtol=2e-4)
    assert found.untouched


def check_approximate_replay(model: CausalLM, window: int) -> None:
    """W tokens leave an error in the logits; fewer leave a larger one, more a smaller one."""
    cases = [replay(model, window, replayed) for replayed in (2, window, 2 * window)]
    errors = [case.error for case in cases]
    print(f"relative error of logits after replay of 2, W, 2W tokens: {errors}")
    assert all(case.untouched for case in cases)
    assert errors[0] > errors[1] > errors[2]
    assert errors[1] < 0.5


def check_all(model: CausalLM, close: float = CLOSE) -> None:
    for cuts in ((1,), (16,), (15, 17), (32, 64), (89,)):
        check_chunks(model, cuts, close)
    check_batch(model, close)
    check_decode_batch(model, close)
    check_prefix_reuse(model, close)
    check_hand_over(model)
